"""Leases on GPUs, cores and main memory, counted host-wide without a daemon.

::

    settings ──> lease request ("0.25", "2GiB" or auto)   footprint: memory of the task's earlier calls
                         │                                      │
                         └───────────> claimant <───────────────┘
                                           │  ledger: mutex (ledger_folder), queue, wake-ups
    tickets: one locked file for each claim of this process; entries: the tickets of all processes
                                           │  state: the entries, and the memory that NVML reports
               admission.plan(cards, leases, waiting): pure, the same in every process
                                           │
                           lease ──> the worker holds the lock of its ticket until it ends

``ledger`` explains the design and its races. ``wording`` says what a claim waits for. ``host`` measures cores
and main memory.
"""
