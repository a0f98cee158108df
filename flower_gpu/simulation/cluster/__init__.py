"""The hosts of a Ray cluster, for a simulated run.

::

    dispatcher ──> hosts: a RemoteHost for each machine; joins and losses of hosts
                     │ models: arrays in many messages go to each host once
                     ▼
                   agent: a Ray actor on each host, with a local host inside

Ray starts the agents and transports messages. The agents request no CPU and no GPU from Ray, because the
ledger of each host grants leases on them. The states of clients stay with the driver, as on one machine.
"""
