"""Simulations: a Flower app with thousands of virtual clients, on this machine or a cluster.

::

    ServerApp (run) ── messages ──> grid: pending ─> dispatcher: which host has which message
       ▲                              ▲                │ assigned message: message, seed, the client's state
       │ replies; sums                │                ▼
       └──────────────────────────────┘             host: queue, sums of replies  (local_host)
                                      │                │ a thread for each assignment: one message, or
                                      │                │ a batch (batch_size chooses its size)
                                      │                ▼
                                      │             messages: needs of messages; retries
                                      │                │ message_worker: the worker of an assignment
                                      │             pool: workers, new or parked, with their leases
                                      │                │ host_memory: which messages wait for main memory
                                      │                │ workers: their number, and preloaded data
                                      │                ▼
                                      │             in_worker: loads the app, handles the messages, resets
                                      └─── outcome: reply, without arrays if summed; new state ───┘

Single clients may have their own settings (clients). They come from a table and from the app before the run
begins. In each round, the grid shows the ServerApp the nodes that are available.

A message has one owner at a time: first its set, then a host (as a job), then its set again with the reply.
When a host returns a message or is lost, the message goes back to the queue in its set. If the strategy only
needs the sum of the replies, the exchange thread of each host adds each reply of training as it arrives.
Other strategies get the replies themselves. The grid asks for the sums at the end of a round or of a block of
nodes.

The interface of a host is :class:`flower_gpu.simulation.host.Host`. This machine is a host (local_host).
Another engine is a class of hosts and a line in ``run._hosts``. On a Ray cluster, each host runs a local host
inside an actor.

After each round, a checkpoint is written: an index, and states and models as files. reporting produces the
trace, the result and the final model, and shows the run.
"""
