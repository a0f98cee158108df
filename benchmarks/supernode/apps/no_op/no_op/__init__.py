"""An app of the benchmark supernode.py."""
