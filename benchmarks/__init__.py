"""Benchmarks: a folder for each question, and what they share in ``shared``.

Each runs as ``python -m benchmarks.NAME`` from the root of the repository; README.md says what it measures.
"""
