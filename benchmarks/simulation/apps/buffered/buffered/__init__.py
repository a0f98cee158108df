"""An app of the benchmark simulation.py."""
