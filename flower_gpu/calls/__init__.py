"""A call from start to end: its settings, its lease, its worker, and its retries.

::

    runner: run_call ── settings ──> leasing: may it use a GPU ──> tries: hold a lease (leasing) ──┐
                                                                  │  ▲                             │
          out_of_memory: the next request, with more of a GPU <───┘  │                             ▼
                                                                     │  Call with environment.of_worker(lease)
               told: the worker's reports, for trace and ticket ─────┘                             │
                     footprints <── its memory <── gpu_use <── leased_worker.setup around the task <┘
                                                               ├ frameworks are limited to the lease
                                                               └ environment keeps its GPUs visible

``leased_worker`` and most of ``gpu_use`` run in the worker. Ranks of a call report to its worker. ``notices``
has the log lines, such as the line that says where calls run.
"""
