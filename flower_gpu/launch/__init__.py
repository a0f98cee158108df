"""Running a Flower app with several clients on one machine: ``flower-gpu launch``.

::

    options (command line) ──> plan: the app read, everything checked, nothing started
                                 │  gpu_check asks admission whether all clients can be served
                                 ▼
    run: folder, trace, display ──> federation: SuperLink, SuperNodes, `flwr run`
                                 │
                                 ▼
    supervisor: starts, watches and ends all processes; guard ends them if the launcher is killed
                                 │  trace of the server, logs
                                 ▼
    History ──> display while it runs, result and tables at the end, failures.log

``flower-gpu supernode --count`` runs its SuperNodes by ``supernodes`` and ``supervisor``, with keys from
``node_keys``.
"""
