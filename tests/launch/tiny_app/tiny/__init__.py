"""The tiny app."""
