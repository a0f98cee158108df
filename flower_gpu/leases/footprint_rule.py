"""What a footprint is of, and how much of a GPU a task is taken to need: pure functions.

A caching allocator keeps what tensors give back: with a whole GPU it takes far more than the task needs, and
never trims. With less it gives the cache back when it comes to its cap, and goes on. So what tensors had at
most counts, and a share on top for memory in pieces; docs/explanation/footprint.md has the rule in words.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final, Protocol

#: Stands for the model of a GPU in the footprints of main memory: of calls on the CPU, and on a GPU.
ON_CPU: Final = "main memory"
BESIDE_GPU: Final = "main memory, on a GPU"

#: What is asked for beyond a footprint: a tenth of it, and at least 64 MiB. Calls of the same task differ a
#: little, and the allocator takes memory in blocks of 2 to 20 MiB
#: (PyTorch's CUDACachingAllocator: kSmallBuffer, kLargeBuffer).
MARGIN: Final = 0.10
LEAST_MARGIN_BYTES: Final = 64 << 20

#: What the allocator may need for tensors of one byte, at the beginning: an eighth is lost in pieces with
#: tensors of few sizes. A task for which that was not enough gets a larger share, for good.
LEAST_SPARE: Final = 1.125
#: More is not believed: memory that is in pieces to that degree needs `expandable_segments`, not more memory.
MOST_SPARE: Final = 4.0
#: A block of either of the allocator's pools may be nearly empty (kLargeBuffer).
_BLOCKS_BYTES: Final = 2 * (20 << 20)
#: A call asks for at least so much of what the allocator had in an earlier one: a task that needs more of its
#: cache than others is slowed down first, which is seen, and does not run out of memory at once.
_LARGEST_STEP: Final = 0.85

# Signs that a call was near its cap. Each retry of the allocator has given back all that it kept: one or two
# are how it trims, many slow the call down.
_MANY_RETRIES: Final = 10
_NEARLY_ALL: Final = 0.95

#: What a call is taken to need at most of main memory before anything was measured.
_CAUTIOUS_BYTES: Final = 4 << 30

#: Sizes of a context that are believed, with room to spare for all kernels of PyTorch loaded at once
#: (CUDA_MODULE_LOADING=EAGER, or CUDA before 11.7); not measured. A process that has more memory outside of
#: PyTorch's allocator has another library there (JAX, CuPy), and less is a figure of something else.
LEAST_CONTEXT_BYTES: Final = 64 << 20
MOST_CONTEXT_BYTES: Final = 2 << 30


@dataclass(frozen=True)
class Measured:
    """What one call took of one GPU."""

    peak_bytes: int  # the most that it had, the CUDA context included
    # What of it is outside of the allocator: the context, and what other libraries took
    outside_bytes: int = 0
    # The most that the allocator had of the driver, and that tensors had of the allocator; None where no
    # allocator tells (frameworks other than PyTorch)
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    cap_bytes: int = 0  # what the allocator might have
    num_retries: int = 0  # how often the allocator gave back what it kept, to go on
    # Whether the allocator had nothing when the call began. What it keeps of an earlier call of the same
    # worker says nothing about this one.
    is_first: bool = True

    @property
    def is_near_cap(self) -> bool:
        """Whether a little more memory would have made the call faster, or it had nearly run out."""
        is_full = (self.allocated_bytes or 0) > _NEARLY_ALL * self.cap_bytes
        return self.allocated_bytes is not None and (is_full or self.num_retries > _MANY_RETRIES)


def footprint_bytes(call: Measured, spare: float = LEAST_SPARE) -> int:
    """Return the footprint of one call, without the margin.

    ``call``: what it took.
    ``spare``: what the allocator needs for a byte of tensors, as far as calls of the task have shown.
    """
    if call.allocated_bytes is None or call.reserved_bytes is None:
        return call.peak_bytes
    if call.is_near_cap:
        return call.outside_bytes + max(call.reserved_bytes, call.cap_bytes)
    needed = call.outside_bytes + int(call.allocated_bytes * spare) + _BLOCKS_BYTES
    if call.is_first:
        # With the margin, which comes on top of it, the next call has this step less.
        step = call.outside_bytes + int(call.reserved_bytes * _LARGEST_STEP)
        needed = max(needed, step - max(int(step * MARGIN / (1 + MARGIN)), LEAST_MARGIN_BYTES))
    # What it had was enough, whatever the shares say.
    return min(needed, call.outside_bytes + call.reserved_bytes)


def spare_after(call: Measured, spare: float) -> float:
    """Return the allocator's bytes for a byte of tensors, after one more call. Never less than before."""
    return more_spare(spare, call.cap_bytes, call.allocated_bytes or 0) if call.is_near_cap else spare


def more_spare(spare: float, needed_bytes: int, tensors_bytes: int) -> float:
    """Return the same after a call whose allocator needed so much, at least, for so much in tensors."""
    if tensors_bytes <= 0:
        return spare
    return max(spare, min(MOST_SPARE, needed_bytes / tensors_bytes))


def needed_bytes(footprint: int) -> int:
    """Return the size of a request: the footprint and a margin."""
    return footprint + max(int(footprint * MARGIN), LEAST_MARGIN_BYTES)


def cautious_bytes(total_bytes: int) -> int:
    """Return the assumed main memory of a call without measurements.

    A third of all, so that no more than three of a task begin, and at most 4 GiB: on a large host more do.
    """
    return min(total_bytes // 3, _CAUTIOUS_BYTES)


def is_context(number_bytes: int) -> bool:
    """Tell whether a CUDA context can be so large."""
    return LEAST_CONTEXT_BYTES <= number_bytes <= MOST_CONTEXT_BYTES


# What a footprint is of -------------------------------------------------------------------------------------

# What is in the name of a setting that is about memory; short ones as whole words, since "silent" has "len".
_PARTS = "batch|size|seq|length|image|resol|layer|width|height|hidden|depth|channel|token|patch"
_SIZE = re.compile(rf"{_PARTS}|(?<![a-z])(?:len|dims?|img|bs)(?![a-z])")
_PRECISION = re.compile(r"precision|dtype|(?<![a-z])(?:amp|bf16|fp16)(?![a-z0-9])")
_NUMBERS = re.compile(r"\d{1,9}(?:[x,* ]{1,3}\d{1,9}){0,3}", re.ASCII)
_LONGEST_TEXT = 64

# How dtypes are shown; others by their name.
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class ShapedArray(Protocol):
    """What has a shape and a dtype: numpy arrays, tensors, Flower's arrays."""

    @property
    def shape(self) -> Sequence[int]:
        """Its lengths."""

    @property
    def dtype(self) -> Any:
        """Its element type."""


@dataclass(frozen=True)
class Key:
    """What a footprint is of: calls with the same key are taken to need the same memory."""

    task: str  # name of the function that runs
    weights: str  # number, dtype and digest of the weights: ``"11.2M parameters f32 ab12cd34"``
    gpu: str  # model of the GPU; or :data:`ON_CPU`, or :data:`BESIDE_GPU`
    sizes: tuple[tuple[str, int | str], ...] = ()  # what of the user's config is about sizes, sorted by name

    def on(self, gpu: str) -> Key:
        """Return the same on another model of GPU."""
        return replace(self, gpu=gpu)


def key_of(task: str, arrays: Sequence[ShapedArray], settings: Mapping[str, Any], gpu: str = "") -> Key:
    """Return the key of a call.

    ``task``: name of the function that runs.
    ``arrays``: the weights; only their shapes and dtypes are looked at, in their order.
    ``settings``: the user's config of the call, see :func:`sizes_of`.
    ``gpu``: model of the GPU.
    """
    return Key(task, _describe(arrays), gpu, sizes_of(settings))


def sizes_of(settings: Mapping[str, Any]) -> tuple[tuple[str, int | str], ...]:
    """Return the settings of a config that decide a call's memory, sorted by name.

    Taken are settings whose name speaks of a size (batch, size, seq, length, image, resolution, layer, width,
    height, hidden, depth, channel, token, patch, len, dim, img, bs) and whose value is a whole number, or
    numbers as a text such as ``"224x224"``; and those whose name speaks of a precision (precision, dtype,
    amp, bf16, fp16) and whose value is a bool or a text up to 64 characters. Fractions are left out: these
    are rates, and one that changes from round to round would make each round the first.
    """
    found: dict[str, int | str] = {}
    for name, value in settings.items():
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # imageSize
        if _PRECISION.search(text) and isinstance(value, bool | str) and len(str(value)) <= _LONGEST_TEXT:
            found[name] = str(value)
        elif _SIZE.search(text) and isinstance(value, Integral) and not isinstance(value, bool):
            found[name] = int(value)
        elif _SIZE.search(text) and isinstance(value, str) and _NUMBERS.fullmatch(value):
            found[name] = value
    return tuple(sorted(found.items()))


def _describe(arrays: Sequence[ShapedArray]) -> str:
    count: dict[str, int] = {}
    digest = hashlib.sha256()
    for array in arrays:
        dtype = str(array.dtype).removeprefix("torch.")
        shape = tuple(int(length) for length in array.shape)
        count[dtype] = count.get(dtype, 0) + math.prod(shape)
        digest.update(f"{dtype}{shape}".encode())
    if not count:
        return "no weights"
    most = max(count, key=lambda dtype: count[dtype])
    return f"{_shortened(sum(count.values()))} parameters {_SHORT.get(most, most)} {digest.hexdigest()[:8]}"


def _shortened(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
