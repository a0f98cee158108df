"""The weighted mean of replies that arrive one by one.

The sum of floats depends on the order of addition. If the result must be reproducible, each block of
consecutive nodes has a sum of its own, formed in the order of the nodes. The sums of the blocks are then
added in the order of the blocks. So any host can form the sum of a block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import Any, Final

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from flower_gpu.flower.records import records_of
from flower_gpu.strategies.running_mean import RunningMean

#: Number of consecutive nodes in a block.
BLOCK_NODES: Final = 16


class ReplySum:
    """The sum of replies, to which each is added when it arrives.

    ``weighted_by_key``: name of the metric that is the weight of a reply.
    ``keeps_integers``: as for :class:`RunningMean`.
    ``mean``: mean of the arrays of the replies.
    ``misfit``: why the replies have no mean; empty if they have a mean. Later replies are not added.
    """

    def __init__(self, weighted_by_key: str, *, keeps_integers: bool = True) -> None:
        self.mean = RunningMean(keeps_integers=keeps_integers)
        self.misfit = ""
        self.keeps_integers = keeps_integers
        self._weighted_by_key = weighted_by_key

    def add(self, reply: Message, source: str | None = None) -> None:
        """Add a reply unless it is an error. No reference to the reply, its arrays or their memory is kept.

        ``source``: name of the sender, for errors; the node by default.
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
        """Return the mean of the replies, and free the sums."""
        return self.mean.finish()

    def merge(self, other: ReplySum, source: str) -> None:
        """Add the sum of other replies. That sum cannot be used afterwards."""
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
        self.mean = RunningMean()  # frees the sums


def without_arrays(reply: Message) -> Message:
    """Return a copy of a reply that has only the names of its arrays. Errors are returned unchanged."""
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
    """A placeholder for an array of a reply."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name  # Flower's own __init__ requires data

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(
            f"{attribute!r} of a reply's array: replies are summed as they come, and their arrays are not "
            "kept. Use their metrics, or override aggregate_train, which then gets all replies at once"
        )

    def __repr__(self) -> str:
        return f"<array {self.__dict__['name']!r} of a reply, already summed>"


def weight_of(content: RecordDict, key: str) -> float | None:
    """Return the number with this key from a reply's MetricRecord. None if it has none or several records."""
    records = list(records_of(content, MetricRecord).values())
    value = records[0].get(key) if len(records) == 1 else None
    return None if isinstance(value, list) else value


#: A reply without arrays, from :func:`without_arrays`; or the place where a sum was formed, and the sum.
SumItem = Message | tuple[str, ReplySum]

#: Function that sends messages and yields the results. Its arguments: the key of weights, whether integers
#: stay integers, and whether sums are formed in the order of the nodes.
Sums = Callable[[str, bool, bool], Generator[SumItem, None, None]]


def place(reply: Message) -> tuple[int, int, str]:
    """Return the sort key of a reply: its node, then the message's number on grids that count messages."""
    return reply.metadata.src_node_id, *number_of(reply)


def number_of(reply: Message) -> tuple[int, str]:
    """Return the sort key for the order of sending, for grids that count messages."""
    sent = reply.metadata.reply_to_message_id
    return len(sent), sent


def in_order_of_sending(replies: Iterable[Message]) -> list[Message]:
    """Return replies in the order of their messages, so that the speed of clients does not matter."""
    return sorted(replies, key=number_of)
