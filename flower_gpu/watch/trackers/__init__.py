"""Trackers: sending a run's figures to TensorBoard, Weights & Biases or MLflow while the run is in progress.

    trace.jsonl of the run
         │ new events, read by a thread for each tracker (tracking.py)
      History ── points.py: figures of a round, of its clients, of the GPUs
         │ points
      adapters.py: a class for each tracker, which implements the protocol in points.py

The trace is the queue. A slow tracker reads it later, so a round never waits for a tracker. After an error,
the delivery is retried with growing pauses, starting with the first undelivered point. If a tracker refuses a
point but accepts others, the refused point is dropped. A library is imported only if its tracker is used.
"""
