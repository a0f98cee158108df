"""Benchmarks. Each folder answers one question; ``shared`` and ``app`` hold the common code.

Start one with ``python -m benchmarks.NAME`` from the root of the repository. README.md describes them.
"""
