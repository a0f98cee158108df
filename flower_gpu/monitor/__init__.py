"""Seeing what a run does: live, as a report, as metrics. Reads only."""
