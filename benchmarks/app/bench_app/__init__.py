"""The Flower app of all benchmarks: one server, and one module per kind of client."""
