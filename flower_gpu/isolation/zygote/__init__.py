"""A fork server for one caller's many calls, each of which costs little more than the fork."""
