"""Ranks: several worker processes for one call, one for each GPU of its lease.

::

    call's worker: function.Distributed ──>   run: a worker for each rank ──> rank: joins the others, runs the
    task ▲                          │                             │ └── one result ────────────┴── or one
    error (results) <──┘

The ranks find each other through a file (``rank``). They send their memory figures to the call's worker,
which holds the lease for all of them.
"""
