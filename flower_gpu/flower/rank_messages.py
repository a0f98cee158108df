"""Functions of a ``ClientApp`` in several ranks: Message and Context on the way there and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from flwr.app import Context, Message, MetricRecord, RecordDict

from flower_gpu.flower import message_call
from flower_gpu.flower.records import records_in
from flower_gpu.ranks import rank, results, run
from flower_gpu.ranks.rank import Rendezvous
from flower_gpu.ranks.results import RankNumbers
from flower_gpu.workers.call import Task

_TASK: Final = "flower_gpu.flower.rank_messages:main"
# By which strategies weight: the first is what Flower's look for.
_COUNTS: Final = ("num-examples", "num_examples")


def call(function: Task, timeout_s: float, count: int, *args: Any, **kwargs: Any) -> Any:
    """Run a function that gets a Context in ranks, and take over rank 0's changes of the Context's state.

    ``function``: the user's, in ``count`` ranks that wait ``timeout_s`` seconds for each other at one point.
    ``args``, ``kwargs``: its arguments, a ``Context`` among the first.
    Returns what rank 0 returned, such as the reply, with metrics averaged over the ranks.
    """
    rest = {"kwargs": kwargs, "identity": message_call.identity()}
    value, state = run.run(function, timeout_s, count, args, rest, task=_TASK, merged=_merged)
    message_call.take_over(_context_in(args).state, state)
    return value


def main(rendezvous: Rendezvous, function: Task, args: tuple[Any, ...], rest: Mapping[str, Any]) -> Any:
    """Run the function among the other ranks; runs in a worker of its own."""
    message_call.assume(rest["identity"])
    value = rank.run(rendezvous, function, args, rest["kwargs"])
    return (value, _context_in(args).state) if rendezvous.rank == 0 else _part_of(value)


def _part_of(value: Any) -> RankNumbers:
    """Return the numbers in a reply's MetricRecords."""
    if not isinstance(value, Message):
        return results.part_of(value)
    counts: list[int] = []
    metrics: dict[Any, float] = {}
    for name, record in records_in(value, MetricRecord).items():
        for key, number in results.numbers_in(record).items():
            if key in _COUNTS and isinstance(number, int):
                counts.append(number)
            else:
                metrics[name, key] = number
    return RankNumbers(counts[0] if counts else None, metrics)


def _merged(values: Sequence[Any]) -> tuple[Any, RecordDict]:
    """Return rank 0's reply with metrics averaged over the ranks, and the state of its Context."""
    (value, state), *others = values
    if not isinstance(value, Message):
        return results.merged([value, *others]), state
    parts: list[RankNumbers] = [_part_of(value), *others]
    results.check_num_examples([part.num_examples for part in parts])
    records = records_in(value, MetricRecord)
    for (name, key), number in results.averaged([part.metrics or {} for part in parts]).items():
        records[name][key] = number
    return value, state


def _context_in(args: tuple[Any, ...]) -> Context:
    return next(value for value in args if isinstance(value, Context))
