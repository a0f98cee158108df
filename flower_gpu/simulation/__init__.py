"""Thousands of virtual clients on one machine: a Flower app whose nodes are numbers, not processes.

::

    ServerApp (app, run) ── messages ──> grid ──> messages: one thread for each message under way
                                                     │ node's context and state (nodes, states)
                                                     ▼
                                       slots: a worker, new or recycled, and its lease (lease_turns)
                                                     │ forked by the run's own fork server (workers)
                                                     ▼
                                       worker: loads the app, handles the message; fresh resets between calls
                                                     │ reply and new state
    strategy <── replies as they come ── grid <──────┘
       │ after each round
       ▼
    checkpoint (index in SQLite, states and models as files: places, record_bytes, model_file)
    reporting: trace, History, display, results
"""
