"""An app for tests that handles several messages together."""
