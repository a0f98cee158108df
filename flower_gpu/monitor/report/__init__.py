"""A page about a run, with pictures, made from its trace."""
