"""Sends a run's figures to TensorBoard, Weights & Biases or MLflow, while the run goes on.

    trace.jsonl of the run
         │ new events, read in a thread of each tracker (tracking.py)
      History ── points.py: figures of a round, of its clients, of the GPUs
         │ points
      adapters.py: a class for each tracker, by the protocol in points.py

The trace is the queue: a slow tracker reads later, and no round waits for it. A tracker that fails is tried
again, with growing pauses, from the first point that it has not taken. A point that it refuses while it takes
others is left out. The libraries are imported only where a tracker is asked for.
"""
