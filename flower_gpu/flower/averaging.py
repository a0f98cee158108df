"""The weighted mean of replies that come one by one.

Floats add up to other bits in another order. Where that matters, each block of consecutive nodes has a sum of
its own, formed in the order of the nodes, and the sums of blocks are added up in the order of the blocks. So
any host can form the sum of a block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import Any, Final

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from flower_gpu.flower.records import records_of
from flower_gpu.flower.running_mean import RunningMean

#: Consecutive nodes whose replies are summed one after the other, before their sum is added to the others.
BLOCK_NODES: Final = 16


class ReplySum:
    """Replies that are summed as they come.

    ``weighted_by_key``: name of the metric that replies are weighted by.
    ``keeps_integers``: as for :class:`RunningMean`.
    ``mean``: of their arrays.
    ``misfit``: why there is no mean of the replies; empty if there is one. What came afterwards is not
    summed.
    """

    def __init__(self, weighted_by_key: str, *, keeps_integers: bool = True) -> None:
        self.mean = RunningMean(keeps_integers=keeps_integers)
        self.misfit = ""
        self.keeps_integers = keeps_integers
        self._weighted_by_key = weighted_by_key

    def add(self, reply: Message, source: str | None = None) -> None:
        """Add a reply, if it is no error; keeps no reference to it, to its arrays, or to their memory.

        ``source``: whose reply it is, for errors; by default the node.
        """
        if reply.has_error() or self.misfit:
            return
        source = source or f"node {reply.metadata.src_node_id}"
        records = list(records_of(reply.content, ArrayRecord).values())
        weight = weight_of(reply.content, self._weighted_by_key)
        if len(records) != 1:
            self._has_misfit(f"The reply of {source} has {len(records)} ArrayRecords instead of one.")
        elif weight is None:
            self._has_misfit(f"The reply of {source} has no single number {self._weighted_by_key!r}.")
        elif not self.mean.fits(records[0]):
            self._has_misfit(f"The reply of {source} has other arrays than those before.")
        else:
            self._add(reply, records[0], weight, source)

    def _add(self, reply: Message, record: ArrayRecord, weight: float, source: str) -> None:
        self.mean.add(record, weight, source)

    def finish(self) -> ArrayRecord:
        """Return what comes of the replies, and give up the sums."""
        return self.mean.finish()

    def merge(self, other: ReplySum, source: str) -> None:
        """Add the sum of other replies, which is used up."""
        if self.misfit:
            return
        keys = other.mean.keys()
        if other.misfit:
            self._has_misfit(other.misfit)
        elif keys and not self.mean.fits(keys):
            self._has_misfit(f"The replies of {source} have other arrays than those before.")
        else:
            self.mean.merge(other.mean, source)

    def _has_misfit(self, text: str) -> None:
        self.misfit = text
        self.mean = RunningMean()  # nobody needs the sums any more


def without_arrays(reply: Message) -> Message:
    """Return a reply whose arrays are there by name only; an error as it is."""
    if reply.has_error():
        return reply
    rest = copy.copy(reply)
    rest.content = RecordDict(
        {
            name: _names_of(tuple(record)) if isinstance(record, ArrayRecord) else record
            for name, record in reply.content.items()
        }
    )
    return rest


@lru_cache(maxsize=16)
def _names_of(keys: tuple[str, ...]) -> ArrayRecord:
    """Return a record without arrays for these names, shared by all replies."""
    record = ArrayRecord()
    for key in keys:
        record[key] = _SummedArray(key)
    return record


class _SummedArray(Array):
    """Stands where the array of a reply was."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name  # Flower's own __init__ wants data

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(
            f"{attribute!r} of a reply's array: replies are summed as they come, and their arrays are not "
            "kept. Use their metrics, or override aggregate_train, which then gets all replies at once"
        )

    def __repr__(self) -> str:
        return f"<array {self.__dict__['name']!r} of a reply, already summed>"


def weight_of(content: RecordDict, key: str) -> float | None:
    """Return a number of a reply's only MetricRecord, or None."""
    records = list(records_of(content, MetricRecord).values())
    value = records[0].get(key) if len(records) == 1 else None
    return None if isinstance(value, list) else value


#: A reply as :func:`without_arrays` returns it; or a sum of some replies, and where it was formed.
SumItem = Message | tuple[str, ReplySum]

#: Sends messages, and yields what comes. Called with the key of weights, whether integers stay integers, and
#: whether sums are formed in the order of the nodes.
Sums = Callable[[str, bool, bool], Generator[SumItem, None, None]]


def place(reply: Message) -> tuple[int, int, str]:
    """Return the sort key of replies: the node; then, for grids that count messages, the message's number."""
    return reply.metadata.src_node_id, *number_of(reply)


def number_of(reply: Message) -> tuple[int, str]:
    """Return the sort key for the order of sending, for grids that count messages."""
    sent = reply.metadata.reply_to_message_id
    return len(sent), sent


def in_order_of_sending(replies: Iterable[Message]) -> list[Message]:
    """Return replies in the order of their messages, so that nothing depends on who was done first."""
    return sorted(replies, key=number_of)
