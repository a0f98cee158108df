"""What Flower's strategies, grids and servers do in a process, as events of the trace.

    Strategy, Server, GPUEvaluate ──(strategies.py: wrapped methods)──┐
                                                                      ├── Recorder ── on_event(event)
    Grid ──(recorded_grid.py: messages and replies) ──────────────────┘

The servers that ``launch`` starts write the events to the trace, where the launcher reads them. A simulation
reads them in its own process.
"""
