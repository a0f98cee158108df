"""Flower's long-running programs as forks of one process that has imported Flower.

::

    flower-gpu launch, flower-gpu supernode --count N
      │  starts a process for this run alone, by starter.ProgramServer
      ▼
    server.py: imports what Flower's programs import, once; then it forks for each request
      │  a request has what Popen takes: arguments, environment, folder, output, process group
      ▼
    a fork is the program, as a fresh interpreter would run it: flower-superlink, flower-supernode, ...
      │  where Flower starts another program by Popen (flower-superexec, flwr-clientapp, flwr-serverapp)
      └── that is a request as well, over a socket of its own

What a request cannot have (other variables that Python or Flower read when they start, another interpreter)
starts as it does without all this: by Popen.
"""
