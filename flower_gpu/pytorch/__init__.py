"""Helpers that need torch; importing this package alone does not import it."""
