"""The host's pre-imported process that workers are forked from: one per user and Python environment."""
