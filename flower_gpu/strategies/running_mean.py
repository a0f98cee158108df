"""The weighted mean of records, or the sum of their changes, in the memory of a single model.

Each array is summed in 64-bit floats; complex and extended floats keep their type. Arrays are added in
chunks, so the sums are the only large arrays. Records are added one by one, and each can be freed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flower_gpu.errors import InvalidResultError
from flower_gpu.flower.arrays import view_of

# A smaller chunk is slower, because each chunk costs three calls of numpy. A larger one is no faster.
_SCRATCH_BYTES = 1 << 20
# Sums of small arrays share a block. From 4 MiB on numpy asks for huge pages, which saves page faults and
# time.
_BLOCK_BYTES = 1 << 24
_SMALL = 8192  # number of elements that numpy converts at a time
_ALIGNMENT = 64
_HALF = 2.0**32  # factor of the upper half of a 64-bit integer
_MAX_EXACT = 2.0**53  # 64-bit floats represent all integers up to this exactly


class RunningMean:
    """The weighted mean of records with the same keys.

    ``keeps_integers``: whether integer and bool arrays keep their dtype, so that their mean is rounded.
    Otherwise their mean is a float64.
    """

    def __init__(self, *, keeps_integers: bool = True) -> None:
        self.total_weight: float = 0
        self._keeps_integers = keeps_integers
        self._count = 0
        self._sums: dict[str, _Sum] = {}
        self._zeros = _Zeros()
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)

    def fits(self, record: Mapping[str, object]) -> bool:
        """Return True if a record has the same keys as the earlier records."""
        return self._count == 0 or record.keys() == self._sums.keys()

    def add(
        self,
        record: Mapping[str, Array],
        weight: float,
        source: str,
        base: Mapping[str, Array] | None = None,
    ) -> None:
        """Add a record that :meth:`fits`, with its weight. No reference to the record is kept.

        ``source``: name of the sender, for error messages.
        ``base``: an earlier record with the same keys. If given, the weighted difference between both is
        added. The difference is formed element by element, before it is weighted. An unchanged element adds
        exactly 0, even if it is infinite or NaN, such as the -inf of an attention mask.
        Raises InvalidResultError if an array cannot be added to the earlier arrays.
        """
        for key, value in record.items():
            array = view_of(value)
            earlier = None if base is None else view_of(base[key])
            try:
                if earlier is not None and array.shape != earlier.shape:
                    raise _CannotBeAddedError(
                        f"has shape {array.shape}, and {earlier.shape} in the model that was sent: do all "
                        "clients train the same model?"
                    )
                if self._count == 0:
                    first = array if earlier is None else earlier
                    self._sums[key] = _Sum(first, self._zeros, self._keeps_integers)
                self._sums[key].add(array, weight, self._scratch, earlier)
            except _CannotBeAddedError as error:
                raise InvalidResultError(f"array {key!r} of {source} {error}") from None
        self.total_weight += weight
        self._count += 1

    def added_to(self, model: ArrayRecord, divisor: float) -> ArrayRecord:
        """Return a model plus the sum of all changes divided by ``divisor``, and free the sums.

        Each array keeps its dtype of the model.
        """
        changed = ArrayRecord(dict(model))
        # Each sum is freed before the next array is made, so that two whole models never exist.
        for key in list(self._sums):
            changed[key] = Array(self._sums.pop(key).added_to(view_of(model[key]), divisor))
        return changed

    def merge(self, other: RunningMean, source: str) -> None:
        """Add the sums of another mean with the same keys or without records. It cannot be used afterwards.

        ``source``: name of the senders, for error messages.
        Raises InvalidResultError if an array cannot be averaged with the earlier arrays.
        """
        for key, other_sum in other._sums.items():
            try:
                if self._count == 0:
                    self._sums[key] = other_sum
                else:
                    self._sums[key].merge(other_sum)
            except _CannotBeAddedError as error:
                raise InvalidResultError(f"array {key!r} of {source} {error}") from None
        self.total_weight += other.total_weight
        self._count += other._count

    def keys(self) -> Mapping[str, object]:
        """Return the names of the arrays; empty before the first record."""
        return self._sums

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scratch": np.empty(0, np.uint8), "_zeros": _Zeros()}

    def finish(self) -> ArrayRecord:
        """Return the mean, and free the sums.

        Raises ZeroDivisionError if the weights add up to zero.
        """
        if self.total_weight == 0:
            raise ZeroDivisionError(
                "The weights of all replies add up to 0: there is no mean. "
                "Clients have to report how many examples they trained on."
            )
        mean = ArrayRecord()
        # Each sum is freed before the next array is made, so that two whole models never exist.
        for key in list(self._sums):
            mean[key] = Array(self._sums.pop(key).mean(float(self.total_weight)))
        return mean


class _CannotBeAddedError(Exception):
    """Raised if an array cannot be added. Its text continues a sentence that begins with the array's name."""


class _Zeros:
    """An allocator that cuts arrays of zeros out of larger blocks."""

    def __init__(self) -> None:
        self._free = np.zeros(0, np.uint8)

    def take(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        size_bytes = size * dtype.itemsize
        if size_bytes > self._free.size:
            self._free = np.zeros(max(size_bytes, _BLOCK_BYTES), np.uint8)
        array = self._free[:size_bytes].view(dtype)
        # The next array starts at a cache line.
        self._free = self._free[-(-size_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return array


class _Sum:
    """The weighted sum of arrays with the same shape."""

    def __init__(self, first: NDArray[Any], zeros: _Zeros, keeps_integers: bool) -> None:
        if first.dtype.kind not in "biufc":
            raise _CannotBeAddedError(f"has dtype {first.dtype}, which has no mean: send numbers")
        self._shape = first.shape
        self._order: Any = "F" if first.flags.fnc else "C"
        self._dtype = first.dtype.newbyteorder("=")
        self._is_integer = first.dtype.kind in "biu" and keeps_integers
        self._sum = zeros.take(first.size, np.result_type(first.dtype, np.float64))
        self._seen: np.dtype[Any] | None = None  # dtype of the last array, which was checked

    def add(
        self,
        array: NDArray[Any],
        weight: float,
        scratch: NDArray[np.uint8],
        base: NDArray[Any] | None = None,
    ) -> None:
        """Add an array, or its difference from an earlier array, multiplied by a weight."""
        if array.dtype is not self._seen:
            self._look_at(array.dtype)
            self._seen = array.dtype
        flat = self._broadcast(array).ravel(self._order)  # a view, unless the memory order differs
        flat_base = None if base is None else self._broadcast(base).ravel(self._order)
        summed = self._sum
        factor = float(weight)
        if flat.size <= _SMALL and flat_base is None:
            # For small arrays, calls of numpy are most of the cost. This branch saves a call.
            np.add(summed, np.multiply(flat, factor, dtype=summed.dtype), out=summed)
            return
        chunk = scratch.view(summed.dtype)
        for start in range(0, flat.size, chunk.size):
            part = flat[start : start + chunk.size]
            scaled = chunk[: part.size]
            if flat_base is None:
                # Converted before it is scaled, because a float32 times a Python number is a float32.
                np.copyto(scaled, part)
            else:
                _subtract(part, flat_base[start : start + chunk.size], scaled)
            np.multiply(scaled, factor, out=scaled)
            summed = self._sum[start : start + chunk.size]
            np.add(summed, scaled, out=summed)

    def added_to(self, array: NDArray[Any], divisor: float) -> NDArray[Any]:
        """Return an array of this shape plus the sum divided by ``divisor``, in the dtype of the array."""
        change = np.divide(self._sum, divisor, out=self._sum).reshape(self._shape, order=self._order)
        if array.dtype.kind in "biu":
            return _added_to_integers(array, change)
        with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN, which is what we want here
            changed: NDArray[Any] = np.add(change, array, out=change)
        return changed.astype(array.dtype, copy=False)

    def merge(self, other: _Sum) -> None:
        self._look_at(other._dtype)
        if not other._is_integer:
            self._is_integer = False
        other_sum = other._sum.reshape(other._shape, order=other._order)
        summed = self._broadcast(other_sum).ravel(self._order)
        if not self._sum.flags.writeable:  # a sum from another machine is read-only
            self._sum = self._sum.copy()
        np.add(self._sum, summed, out=self._sum)

    def mean(self, total_weight: float) -> NDArray[Any]:
        summed = self._sum if self._sum.flags.writeable else self._sum.copy()
        mean: NDArray[Any] = np.divide(summed, total_weight, out=summed)
        if self._is_integer:
            mean = _rounded(mean, self._dtype)
        elif self._dtype.kind in "biu":  # all replies are integers, and their mean must be a float
            self._dtype = mean.dtype
        return mean.astype(self._dtype, copy=False).reshape(self._shape, order=self._order)

    def _look_at(self, dtype: np.dtype[Any]) -> None:
        """Check that arrays of this dtype can be added, and widen the mean's dtype to hold them.

        The mean's dtype is that of a numpy expression with all arrays, so it does not depend on the order of
        the replies.
        """
        is_complex = dtype.kind == "c"
        if is_complex != (self._dtype.kind == "c") or not np.can_cast(dtype, self._sum.dtype, "same_kind"):
            raise _CannotBeAddedError(
                f"has dtype {dtype}, which cannot be added to {self._dtype} of earlier replies"
            )
        if dtype.kind not in "biu":
            self._is_integer = False
        if dtype != self._dtype:
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


def _subtract(array: NDArray[Any], base: NDArray[Any], out: NDArray[Any]) -> None:
    """Write an array minus an earlier array to ``out``, which has floats. Equal elements become exactly 0."""
    if {array.dtype.kind, base.dtype.kind} <= {"i", "u"} and max(array.itemsize, base.itemsize) == 8:
        # A 64-bit float cannot represent all of these integers, but it can represent their halves. The
        # differences of the halves are exact. Their sum is rounded if it is beyond 2**53.
        (high, low), (high_base, low_base) = _halves(array), _halves(base)
        np.subtract(high, high_base, out=out)
        np.multiply(out, _HALF, out=out)
        np.add(out, low - low_base, out=out)
        return
    np.copyto(out, array)
    with np.errstate(invalid="ignore"):
        is_same = None if np.isfinite(base).all() else (out == base) | (np.isnan(out) & np.isnan(base))
        np.subtract(out, base, out=out)
    if is_same is not None:
        out[is_same] = 0


def _halves(array: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the upper and the lower 32 bits of integers, as floats: ``upper * 2**32 + lower``."""
    whole = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64, copy=False)
    return (whole >> 32).astype(np.float64), (whole & 0xFFFFFFFF).astype(np.float64)


def _added_to_integers(array: NDArray[Any], change: NDArray[Any]) -> NDArray[Any]:
    """Return integers plus changes, rounded. The sum is exact even beyond the range of exact 64-bit floats.

    Such large integers are usually seeds and hashes, hardly ever whole arrays. So the slow way, to add them
    as Python integers, is good enough.
    """
    sums = np.asarray(change + array)  # for arrays without dimensions, numpy's sum is a scalar
    rounded = _rounded(sums.copy(), array.dtype)
    if array.itemsize == 8:
        largest = np.maximum(np.abs(sums), np.abs(array.astype(np.float64)))
        is_large = np.asarray((largest >= _MAX_EXACT) & np.isfinite(sums))
        np.copyto(rounded, array, where=is_large)
        is_large &= change != 0
        limits = np.iinfo(array.dtype)
        pairs = zip(array[is_large].tolist(), np.rint(change[is_large]).tolist(), strict=True)
        rounded[is_large] = [min(max(entry + int(step), limits.min), limits.max) for entry, step in pairs]
    return rounded


def _rounded(mean: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a mean of integers as integers, clipped to their range, which float rounding may leave."""
    mean = np.rint(mean, out=mean)
    if dtype.kind not in "iu":
        return mean.astype(dtype)
    limits = np.iinfo(dtype)
    with np.errstate(invalid="ignore"):
        rounded = mean.astype(dtype)
    rounded[mean >= float(limits.max)] = limits.max
    rounded[mean <= float(limits.min)] = limits.min
    return rounded
