"""A simulated run on the hosts of a Ray cluster.

::

    ServerApp (run) ── messages ──> grid ──> hosts: who has room? a thread for each of them
                                                │ message and its client's state; the model once for each host
                                                ▼
                                   agent: an actor on each host, with what one machine has for a run
                                                │ (host: fork server, workers, leases of that host)
    grid <── reply, new state ──────────────────┘

Ray starts the agents and carries what is sent; it is asked for no CPU and no GPU. Who uses what on a host is
that host's ledger's matter. The states of clients stay with the driver, as on one machine.
"""
