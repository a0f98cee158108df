"""The resumed app."""
