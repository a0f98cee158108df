"""Who may have how much of the GPUs of this host. There is no daemon: files and locks that the kernel keeps.

::

    settings ──> request ("0.25", "2GiB" or auto)      footprint: what earlier calls of the task took
                     │                                      │
                     └───────────────> claimant <───────────────┘
                                         │  ledger: mutex, line, waking up
    ledger_folder: a file (ticket) for each request and lease of the host
                                         │
               admission.plan(cards, holdings, claims): pure, the same in every process
                                         │
                           lease ──> the worker holds its ticket's lock until it is gone
"""
