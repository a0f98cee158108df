"""The fork server: a process that has imported libraries, and forks workers for its callers.

Each user and environment of a host has its own server. A server with preloaded data is a fork of it.

::

    client: finds or starts a server ── program: becomes the server ── server: its loop; forking: its state
      │ identity: the server that fits a caller; sockets: where servers listen, and who may use them
      │ libraries: imports and learning; fitness: checks that a caller would import the same code
      │ attributes: what forks inherit from the kernel; waiting: messages of a waiting caller
      ▼
    a fork is a worker (workers/worker.py), or a program (workers/interpreter.py). The command that the user
    has started waits for the program (proxy)

``server`` explains the design and its races.
"""
