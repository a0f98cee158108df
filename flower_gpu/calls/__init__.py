"""One call put together: its settings, its lease, its worker, and a second try.

::

    run_call (runner) ── settings ──> leasing: decide, wait, hold a lease ──┐
        │   ▲                                                              │
        │   └── out_of_memory: the next try, with more of a GPU            ▼
        └── Call with environment.of_worker(lease) ──> workers.caller ──> worker:
                                                         leased_worker.setup around the task
                                                         ├ frameworks are held to the lease
                                                         ├ fixed_variables keep its GPUs visible
                                                         └ gpu_use: its memory, as an event ──> footprints

The modules on the right side run in the worker. Ranks of one call tell its worker (rank_figures).
"""
