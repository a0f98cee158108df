"""Messages between caller and worker: a small pickle, and arrays in sealed memory files."""
