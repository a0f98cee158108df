"""An app of the tests."""
