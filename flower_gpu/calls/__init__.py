"""One call put together: its settings, its lease, its worker, and a second try.

::

    runner: run_call ── settings ──> leasing: may it use a GPU ──> tries: hold a lease (leasing) ──┐
                                                                  │  ▲                             │
          out_of_memory: the next request, with more of a GPU <───┘  │                             ▼
                                                                     │  Call with environment.of_worker(lease)
               told: what the worker tells, for trace and ticket ────┘                             │
                     footprints <── its memory <── gpu_use <── leased_worker.setup around the task <┘
                                                               ├ frameworks are held to the lease
                                                               └ environment keeps its GPUs visible

``leased_worker`` and most of ``gpu_use`` run in the worker. Ranks of one call tell its worker. ``notices``
has the lines of the log, and of where calls run.
"""
