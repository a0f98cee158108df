"""Thousands of virtual clients on one machine: a Flower app whose nodes are numbers, not processes.

::

    ServerApp (run) ── messages ──> grid ──> messages: one thread for each message under way
                                                │ node's context and state (nodes, states)
                                                ▼
                                  slots: a worker, new or recycled, and its lease
                                                │ lease_turns: who asks for one, which workers idle
                                                │ needs: what they are forked with; workers: how many
                                                ▼
                                  in_worker: loads the app, handles the message, resets the process
                                                │ reply and new state
    strategy <── replies as they come ── grid <─┘
       │ after each round
       ▼
    checkpoint (index in SQLite, states and models as files: record_files)
    durations: what messages take; the grid hands out the longest of a round first
    reporting: trace, History, display, result; model_file: the final model
"""
