"""Run calls in processes that exit afterwards, so their memory is freed and a crash fails one call only.

::

    caller.run(call, method)                          in the caller's process
       |  Line: a worker for one call, or for several, one after the other
       |  methods: choose how it starts; call: task, arguments, environment
       |  transport: the arguments go into a sealed memory file, or stay where a fork finds them
       v
    a worker starts:   spawn          a fresh interpreter
                       fork           a copy of the caller
                       forkserver --> forkserver/: client finds or starts a process that has imported the
                                      libraries; it forks itself (server), and learns what workers import
       |
       |  life pipe: when the caller is gone, the kernel kills the worker's group (life)
       v
    worker.serve: environment, threads, task; then the task runs      in the worker's process
       |  a socket (messages): the call comes from it, with the descriptors of its memory files;
       |  JSON messages go to it (progress, imports, "result"; events)
       |  stdout, stderr: text (output)
       |  transport: the result goes into a memory file that the caller has made; it is sealed
       v
    started_worker: waits for result, process and deadline together, and lets the worker wait for the next
            call, or ends its whole group; call_watch: what it has seen of the call
    caller: maps the result (transport, or confined_replies for a confined worker); call_end: returns the
            value or raises the error
"""
