"""The folds of a history. Each takes in the events of a trace, and sums up one topic of the run.

    event ── run     start, end and pauses of the run, its settings and facts
          ├─ hosts   GPUs with their samples, and the hosts of a Ray cluster
          ├─ leases  requests, and the leases that they became
          ├─ calls   workers and the calls that they handle
          └─ rounds  messages, replies and metrics of the rounds, and the failures of clients

A fold takes in events through :meth:`fold`. Its ``match`` statement lists the events that the fold reads. A
fold may read the folds above it in this list. ``calls`` also reads ``rounds``, and adds calls to leases and
to the open round.

Incomplete traces: a killed process does not report the end of its workers, and a full disk cuts lines. So
each fold accepts an end without a beginning, and the reverse. A resumed run appends to the same trace and
repeats its last rounds. So the folds remove the first attempt of a repeated round from the results.

Memory: a view of a run in progress needs neither finished workers nor old samples. With
``keep_finished=False``, a fold drops finished items, except for a bounded number of recent ones. The work for
an event never depends on the number of rounds.
"""
