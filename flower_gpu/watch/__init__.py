"""Views of a run: live, as a report, as metrics.

    trace.jsonl, or a recorder in the same process
         │ events
      History ──┬── display: bars or lines while the run goes on
                ├── top/, report/, metrics
                ├── trackers/: TensorBoard, Weights & Biases, MLflow
                └── result: result.json and metrics.csv of launch and simulate

A history is the only thing that folds events; all others are views on it.
"""
