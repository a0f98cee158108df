"""A Flower app on disk (``app``, ``app_imports``), and the run of an app.

A run has a folder. ``folder`` defines the names of all files in it. ``recording`` registers the run among the
running runs, and writes its start, its end and samples of the GPUs into the trace. ``failures`` keeps the
failed messages. This package does not import flwr.
"""
