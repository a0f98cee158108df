"""The weighted mean of replies that come one by one, in the memory of one model.

Each array is summed in 64-bit floats (complex and extended ones as they are), a chunk at a time, so that the
sums are the only large arrays. A reply can be freed as soon as it was added.

Floats add up to other bits in another order. Where that matters, each block of consecutive nodes has a sum of
its own, formed in the order of the nodes, and the sums of blocks are added up in the order of the blocks. So
any host can form the sum of a block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_gpu.errors import InvalidResultError
from flower_gpu.flower.arrays import view_of
from flower_gpu.flower.records import records_of

#: Consecutive nodes whose replies are summed one after the other, before their sum is added to the others.
BLOCK_NODES: Final = 16

# A smaller one is slower: each chunk costs three calls of numpy. A larger one is no faster.
_SCRATCH_BYTES = 1 << 20
# Sums of small arrays lie together: numpy asks for huge pages from 4 MiB on, which saves faults and time.
_BLOCK_BYTES = 1 << 24
_SMALL = 8192  # numbers: numpy converts so many at a time
_ALIGNMENT = 64


class RunningMean:
    """Weighted mean of records with the same keys.

    ``keeps_integers``: whether integer and bool arrays stay what they are: their mean is rounded. Else it is
    a float64.
    """

    def __init__(self, *, keeps_integers: bool = True) -> None:
        self.total_weight: float = 0
        self._keeps_integers = keeps_integers
        self._count = 0
        self._sums: dict[str, _Sum] = {}
        self._zeros = _Zeros()
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)

    def fits(self, record: Mapping[str, object]) -> bool:
        """Return whether a record has the same keys as those before."""
        return self._count == 0 or record.keys() == self._sums.keys()

    def add(self, record: Mapping[str, Array], weight: float, source: str) -> None:
        """Add a record that :meth:`fits` with its weight; keeps no reference to it.

        ``source``: whose it is, for messages.
        Raises InvalidResultError if an array cannot be averaged with those before.
        """
        for key, value in record.items():
            array = view_of(value)
            try:
                if self._count == 0:
                    self._sums[key] = _Sum(array, self._zeros, self._keeps_integers)
                self._sums[key].add(array, weight, self._scratch)
            except _CannotBeAddedError as error:
                raise InvalidResultError(f"array {key!r} of {source} {error}") from None
        self.total_weight += weight
        self._count += 1

    def merge(self, other: RunningMean, source: str) -> None:
        """Add the sums of another mean, whose records have the same keys, if any; it is used up.

        ``source``: whose they are, for messages.
        Raises InvalidResultError if an array cannot be averaged with those before.
        """
        for key, theirs in other._sums.items():
            try:
                if self._count == 0:
                    self._sums[key] = theirs
                else:
                    self._sums[key].merge(theirs)
            except _CannotBeAddedError as error:
                raise InvalidResultError(f"array {key!r} of {source} {error}") from None
        self.total_weight += other.total_weight
        self._count += other._count

    def keys(self) -> Mapping[str, object]:
        """Return the arrays' names; none as long as nothing was added."""
        return self._sums

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scratch": np.empty(0, np.uint8), "_zeros": _Zeros()}

    def finish(self) -> ArrayRecord:
        """Return the mean, and give up the sums.

        Raises ZeroDivisionError if the weights add up to zero.
        """
        if self.total_weight == 0:
            raise ZeroDivisionError(
                "The weights of all replies add up to 0: there is no mean. "
                "Clients have to report how many examples they trained on."
            )
        mean = ArrayRecord()
        for key in list(self._sums):  # one by one, so that there are never two whole models
            mean[key] = Array(self._sums.pop(key).mean(float(self.total_weight)))
        return mean


class _CannotBeAddedError(Exception):
    """Its text follows the name of the array."""


class _Zeros:
    """Cuts arrays of zeros out of larger ones."""

    def __init__(self) -> None:
        self._left = np.zeros(0, np.uint8)

    def take(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        size_bytes = size * dtype.itemsize
        if size_bytes > self._left.size:
            self._left = np.zeros(max(size_bytes, _BLOCK_BYTES), np.uint8)
        taken = self._left[:size_bytes].view(dtype)
        # What follows starts at a cache line.
        self._left = self._left[-(-size_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken


class _Sum:
    """Weighted sum of arrays of one shape."""

    def __init__(self, first: NDArray[Any], zeros: _Zeros, keeps_integers: bool) -> None:
        if first.dtype.kind not in "biufc":
            raise _CannotBeAddedError(f"has dtype {first.dtype}, of which there is no mean: send numbers")
        self._shape = first.shape
        self._order: Any = "F" if first.flags.fnc else "C"
        self._dtype = first.dtype.newbyteorder("=")
        self._is_integer = first.dtype.kind in "biu" and keeps_integers
        self._sum = zeros.take(first.size, np.result_type(first.dtype, np.float64))
        self._seen: np.dtype[Any] | None = None  # of the last array, which was looked at

    def add(self, array: NDArray[Any], weight: float, scratch: NDArray[np.uint8]) -> None:
        if array.dtype is not self._seen:
            self._look_at(array.dtype)
            self._seen = array.dtype
        flat = self._broadcast(array).ravel(self._order)  # a view, unless it is laid out in another way
        summed = self._sum
        factor = float(weight)
        if flat.size <= _SMALL:  # numpy calls are what it costs: one less
            np.add(summed, np.multiply(flat, factor, dtype=summed.dtype), out=summed)
            return
        chunk = scratch.view(summed.dtype)
        for start in range(0, flat.size, chunk.size):
            part = flat[start : start + chunk.size]
            scaled = chunk[: part.size]
            np.copyto(scaled, part)  # before it is scaled: a float32 times a number is a float32
            np.multiply(scaled, factor, out=scaled)
            summed = self._sum[start : start + chunk.size]
            np.add(summed, scaled, out=summed)

    def merge(self, other: _Sum) -> None:
        self._look_at(other._dtype)
        if not other._is_integer:
            self._is_integer = False
        theirs = other._sum.reshape(other._shape, order=other._order)
        summed = self._broadcast(theirs).ravel(self._order)
        if not self._sum.flags.writeable:  # it came from another machine
            self._sum = self._sum.copy()
        np.add(self._sum, summed, out=self._sum)

    def mean(self, total_weight: float) -> NDArray[Any]:
        summed = self._sum if self._sum.flags.writeable else self._sum.copy()
        mean: NDArray[Any] = np.divide(summed, total_weight, out=summed)
        if self._is_integer:
            mean = _rounded(mean, self._dtype)
        elif self._dtype.kind in "biu":  # the first reply's; others sent floats
            self._dtype = mean.dtype
        return mean.astype(self._dtype, copy=False).reshape(self._shape, order=self._order)

    def _look_at(self, dtype: np.dtype[Any]) -> None:
        if not np.can_cast(dtype, self._sum.dtype, "same_kind"):
            raise _CannotBeAddedError(
                f"has dtype {dtype}, which cannot be added to {self._dtype} of earlier replies"
            )
        if dtype.kind not in "biu":
            self._is_integer = False
        elif self._is_integer and dtype != self._dtype:
            self._dtype = np.result_type(dtype, self._dtype)

    def _broadcast(self, array: NDArray[Any]) -> NDArray[Any]:
        if array.shape == self._shape:
            return array
        try:
            return np.broadcast_to(array, self._shape)  # as numpy's += does in Flower's mean
        except ValueError:
            raise _CannotBeAddedError(
                f"has shape {array.shape}, and {self._shape} in earlier replies: do all clients train "
                "the same model?"
            ) from None


def _rounded(mean: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a mean of integers as integers. A rounding of the float must not leave their range."""
    mean = np.rint(mean, out=mean)
    if dtype.kind not in "iu":
        return mean.astype(dtype)
    limits = np.iinfo(dtype)
    with np.errstate(invalid="ignore"):
        rounded = mean.astype(dtype)
    rounded[mean >= float(limits.max)] = limits.max
    rounded[mean <= float(limits.min)] = limits.min
    return rounded


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

    def add(self, reply: Message) -> None:
        """Add a reply, if it is no error; keeps no reference to it, to its arrays, or to their memory."""
        if reply.has_error() or self.misfit:
            return
        source = f"node {reply.metadata.src_node_id}"
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
