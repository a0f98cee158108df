"""A call from start to end: its settings, its lease, its worker, and its retries.

::

    runner: run_call ── settings ──> leasing: may it use a GPU ──> tries: hold a lease (leasing) ──┐
                                                                  │  ▲                             │
          out_of_memory: the next request, with more of a GPU <───┘  │                             ▼
                                                                     │   Call with grants.environment(terms)
              worker_report: its events, for trace and ticket ───────┘                             │
                  footprints <── its memory <── gpu_use <── grants.in_worker around the task <─────┘

``grants`` has one file for each thing that a worker is granted or denied, such as a part of a GPU's memory.
Ranks of a call report to its caller through its worker. ``notices`` has the log lines, such as the line that
says where calls run.
"""
