"""The fork server: a process with libraries that forks a worker for each caller that asks for one.

There is one for each user and environment of a host; one with preloaded data is derived from it.

::

    client: finds or starts it ── program: becomes it ── server: the loop; forking: what it watches
      │ identity: which one fits a caller; sockets: where it is, and who may use it
      │ libraries: what it imports and learns; fitness: whether a caller would find the same
      │ attributes: what the kernel hands to a fork; waiting: what a caller says while it waits
      ▼
    a fork is a worker (workers/worker.py), or a program (workers/interpreter.py), for which the command that
    the user has started waits (proxy)
"""
