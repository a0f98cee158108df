"""Resuming a run after its last finished round, with ``simulate``, ``launch`` or ``resumable()``.

    Strategy.start ─> rounds.run ── finished_round ──> KeptRounds ──> Checkpoints ──> a folder
                          └──────── resumed ─────────────┘              └── states of virtual nodes

A grid with the methods ``resumed`` and ``finished_round`` is a ``rounds.ResumableGrid``. ``KeptRounds`` adds
these methods to a grid: of a simulation, of the ServerApp of ``launch``, or of a strategy with
``resumable()``.
"""
