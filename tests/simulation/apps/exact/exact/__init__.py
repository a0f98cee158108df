"""An app for tests that contains everything that can change bits."""
