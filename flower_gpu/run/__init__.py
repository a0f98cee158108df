"""Runs of this host: which there are, and what is written down of each besides its calls."""
