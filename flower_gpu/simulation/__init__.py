"""Thousands of virtual clients: a Flower app whose nodes are numbers, handled by this machine or a cluster.

::

    ServerApp (run) ── messages ──> grid: boxes ──> dispatcher: which host has which message
       ▲                              ▲                │ visit: message, seed, the client's state
       │ replies; sums                │                ▼
       └──────────────────────────────┘             host: queue, sums of replies  (local_host)
                                      │                │ a thread for each assignment: one message, or
                                      │                │ several at once (batch_size says how many)
                                      │                ▼
                                      │             messages: what messages need; another try
                                      │                │ host_memory: which messages wait for main memory
                                      │             slots: a worker, new or recycled, and its lease
                                      │                │ lease_turns: who asks for one, which workers idle
                                      │                │ workers: how many, and what they are forked with
                                      │                ▼
                                      │             in_worker: loads the app, handles the messages, resets
                                      └─── answer: reply or what is not summed of it, new state ───┘

What single clients have of their own (clients) comes from a table and from the app, before the run begins.
The grid shows the ServerApp the nodes that are there in its round.

A message has one owner at a time. It waits in its box; a host has it (a job); its answer is here. A host that
gives it back, or is lost, puts it into its box again. Replies of training are summed at the host; the sum
comes when the grid asks for it, at the end of a round or of a block of nodes.

A host is :class:`flower_gpu.simulation.host.Host`. This machine is one (local_host); another engine is a
class of hosts, and a line in ``run._hosts``: those of a Ray cluster run a local host inside an actor each.

After each round: checkpoint (an index, states and models as files). reporting: trace, History,
display, result, the final model.
"""
