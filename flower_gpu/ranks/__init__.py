"""A function of one call in several processes at once, one for each GPU of its lease."""
