"""An app for tests: all that can change bits is in it."""
