"""How a run goes on after its last finished round: of ``simulate``, of ``launch``, or with ``resumable()``.

    Strategy.start ─> rounds.run ── finished_round ──> FirstStart ──> Checkpoints ──> a folder
                          └──────── resumed ─────────────┘              └── states of virtual nodes

A grid that has ``resumed`` and ``finished_round`` is a ``rounds.ResumableGrid``: that of a simulation, the
one that the ServerApp of ``launch`` gets, and what ``resumable()`` makes of any grid of Flower's.
"""
