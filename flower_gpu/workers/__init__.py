"""Run one call in one process that then exits: its memory is free again, and its death is one error.

::

    caller.run(call, method)                          the caller's process
       |  methods: choose how it starts; call: task, arguments, environment
       |  transport: the arguments go into a sealed memory file, or stay where a fork finds them
       v
    a worker starts:   spawn          a fresh interpreter
                       fork           a copy of the caller
                       forkserver --> forkserver/: a process with the libraries, found or started by
                                      client, forks itself (server); it learns what workers import
       |
       |  life pipe: when the caller is gone, the kernel kills the worker's group (life)
       v
    worker.serve: environment, threads, task; then the task runs      the worker's process
       |  events: JSON lines while it runs (progress, imports, "result")
       |  stdout, stderr: text (outcomes)
       |  transport: the result goes into a memory file that the caller has made; it is sealed
       v
    caller: waits for result, process and deadline together, ends the whole group,
            checks and maps the result (outcomes), or raises what happened

A simulation has thousands of short calls. A fork server of its own forks its workers (forkserver/run_server
and run_program; it is itself a fork of the host's). Each worker reads one call after the other from a line
(forkserver/line).
"""
