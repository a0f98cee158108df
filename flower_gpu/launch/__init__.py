"""Running a Flower app with several clients on one machine: ``flower-gpu launch``.

::

    options (command line) ──> plan: reads the app and checks everything; starts nothing
                                 │  gpu_check asks admission whether the GPUs can serve all clients
                                 ▼
    run: folder, trace, ShownRun ──> federation: SuperLink, SuperNodes, `flwr run`
                                 │
                                 ▼
    supervisor: starts, watches and ends all processes; guard ends them if the launcher is killed
                                 │  trace of the server, logs
                                 ▼
    ShownRun ──> progress and failures (event_lines) while it runs, result and tables at the end

``flower-gpu supernode --count`` runs its SuperNodes with ``supernodes`` and ``supervisor``.
"""
