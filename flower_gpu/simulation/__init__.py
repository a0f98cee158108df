"""Thousands of virtual clients on one machine: a Flower app whose nodes are numbers, not processes."""
