"""Views of a run: live, as a report, as metrics.

    trace.jsonl, or a recorder in the same process
         │ events
      History with its folds: run, hosts, leases, calls, rounds
                ├── shown_run: what launch and simulate show meanwhile; display: its bars or lines
                ├── top/, report/, metrics
                ├── trackers/: TensorBoard, Weights & Biases, MLflow
                └── result: result.json and metrics.csv of launch and simulate

Only the folds of the history turn events into a state. All other modules are views of it.
"""
