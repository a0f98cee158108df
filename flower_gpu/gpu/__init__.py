"""Which GPU a call gets, and how much of it."""
