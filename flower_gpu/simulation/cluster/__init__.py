"""The hosts of a Ray cluster, for a simulated run.

::

    dispatcher ──> hosts: a RemoteHost for each machine; who joins, who is lost
                     │ arrays that many messages have go to each host once (models)
                     ▼
                   agent: an actor of Ray on each host, with a local host inside

Ray starts the agents and carries what is sent; it is asked for no CPU and no GPU. Who uses what on a host is
that host's ledger's matter. The states of clients stay with the driver, as on one machine.
"""
