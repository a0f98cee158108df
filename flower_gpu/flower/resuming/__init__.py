"""How a run goes on after its last finished round: of ``simulate``, of ``launch``, or with ``resumable()``.

    Strategy.start ─> rounds.run ── finished_round ──> KeptRounds ──> Checkpoints ──> a folder
                          └──────── resumed ─────────────┘              └── states of virtual nodes

A grid that has ``resumed`` and ``finished_round`` is a ``rounds.ResumableGrid``. ``KeptRounds`` gives them to
a grid: that of a simulation, that of the ServerApp of ``launch``, and any that ``resumable()`` meets.
"""
