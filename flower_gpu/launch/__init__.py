"""Running a Flower app with several clients on one machine: ``flower-gpu launch``.

::

    options (command line) ──> plan: the app read, everything checked, nothing started
                                 │  gpu_check asks admission whether all clients can be served
                                 ▼
    run: folder, trace, display ──> engine: superlink (SuperLink, SuperNodes, the run)
                                 │          or start-client (one server, N clients: start_client_program)
                                 ▼
    supervisor: starts, watches and ends all processes; guard ends them if the launcher is killed
                                 │  trace of the server, logs
                                 ▼
    History ──> display while it runs, result.json and tables at the end, failures.log

``slurm`` stands beside this: it has Slurm run ``flower-gpu simulate``.
"""
