"""Strategies of a server: rounds, sums of replies, evaluation, recording and resuming.

``strategy`` (FedAvg) and ``fedbuff`` run rounds (``rounds``), sum replies (``averaging``) and evaluate
(``evaluate``). In a simulation Flower's own strategies do the same (``streaming``), and can go on later
(``strategy_state``). ``recording/`` writes all of that into the trace, and ``resuming/`` continues a run
after its last finished round.
"""
