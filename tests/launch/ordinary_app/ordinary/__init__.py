"""The ordinary app."""
