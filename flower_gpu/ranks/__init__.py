"""One function of a call in several processes (ranks), one for each GPU of its lease.

::

    call's worker: function.Distributed ──>   run: a worker for each rank ──> rank: joins the others, runs it
                        ▲                          │                             │
                        └── one result ────────────┴── or one error (results) <──┘

The ranks meet over a file in memory (rank); their memory figures go to the worker of the call, which
holds the lease for them all.
"""
