"""Our versions of Flower's programs.

``commands`` draws which program starts which. ``clientapp`` runs a message of a SuperNode in a worker,
``supernode`` and ``superexec`` wake each other (``waits``), and ``serverapp`` records and resumes a run.
``environments`` has the packages that apps declare, and ``confine`` the limits of an operator.

Programs that run for long are forks of a process that has imported Flower:

::

    flower-gpu launch, flower-gpu supernode --count N
      │  starts a server process for this run alone, by starter.start_server
      ▼
    server.py: imports the modules of Flower's programs once, then forks for each request
      │  a request has the arguments of Popen: arguments, environment, folder, output, process group
      ▼
    a fork runs the program as a fresh interpreter would: flower-superlink, flower-supernode, ...
      │  when Flower starts another program by Popen (flower-superexec, flwr-clientapp, flwr-serverapp)
      └── it sends a request as well, over a socket of its own

A program that needs another interpreter starts by Popen, as it does without a server. The same holds for a
program with other values of the variables that Python or Flower read when they start.
"""
