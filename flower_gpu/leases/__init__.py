"""Who may have how much of the GPUs of this host. There is no daemon: files and locks that the kernel keeps.

::

    settings ──> lease request ("0.25", "2GiB" or auto)   footprint: what earlier calls of the task took
                         │                                      │
                         └───────────> claimant <───────────────┘
                                           │  ledger: mutex (ledger_folder), line, waking up
    tickets: a file for each claim of this process; entries: what those of all processes say
                                           │  state: entries, and what the driver tells
               admission.plan(cards, leases, waiting): pure, the same in every process
                                           │
                           lease ──> the worker holds its ticket's lock until it is gone

``wording`` says of a state what a claim waits for. ``host`` counts cores and main memory.
"""
