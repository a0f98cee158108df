"""The key and the size of a footprint: how much memory the next call of a task is assumed to need.

A caching allocator keeps what tensors give back. With a whole GPU it takes far more than the task needs, and
never trims. With less it returns its cache when it reaches its cap, and goes on. So the footprint is the peak
of the tensors, plus a fraction for fragmentation. docs/explanation/footprint.md explains the rule.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final, Protocol

#: Values of :attr:`Key.gpu` for footprints of main memory: of calls on the CPU, and of calls on a GPU.
ON_CPU: Final = "main memory"
BESIDE_GPU: Final = "main memory, on a GPU"

#: Margin on top of a footprint: a tenth, and at least 64 MiB. Calls of the same task differ a little, and the
#: allocator takes memory in blocks of 2 to 20 MiB (PyTorch's CUDACachingAllocator: kSmallBuffer,
#: kLargeBuffer).
MARGIN: Final = 0.10
LEAST_MARGIN_BYTES: Final = 64 << 20

#: Initial spare: bytes of the allocator for each byte of tensors. With tensors of few sizes, an eighth is
#: lost to fragmentation. A task that needs more gets a larger spare, and keeps it.
LEAST_SPARE: Final = 1.125
#: Largest spare. A task with more fragmentation needs ``expandable_segments``, not more memory.
MOST_SPARE: Final = 4.0
#: One block of each of the allocator's two pools may be nearly empty (kLargeBuffer).
_BLOCKS_BYTES: Final = 2 * (20 << 20)
#: Smallest fraction of the previous call's allocator memory that the next call requests. A task that relies
#: on its cache becomes slower first, which can be measured, instead of running out of memory at once.
_LARGEST_STEP: Final = 0.85

# Signs that a call was close to its cap. Each retry of the allocator has returned the whole cache. One or two
# retries are normal trimming, many slow the call down.
_MANY_RETRIES: Final = 10
_NEARLY_ALL: Final = 0.95

#: Upper limit of the assumed main memory of a call without measurements.
_CAUTIOUS_BYTES: Final = 4 << 30

#: Plausible sizes of a CUDA context. The upper limit leaves room for all kernels of PyTorch loaded at once
#: (CUDA_MODULE_LOADING=EAGER, or CUDA before 11.7); that size was not measured. A process with more memory
#: outside of PyTorch's allocator uses another library there (JAX, CuPy). A smaller figure is not a context.
LEAST_CONTEXT_BYTES: Final = 64 << 20
MOST_CONTEXT_BYTES: Final = 2 << 30


@dataclass(frozen=True)
class Measured:
    """Measured memory of one call on one GPU."""

    peak_bytes: int  # peak of the worker, including the CUDA context
    # Part of the peak outside of the allocator: the context and other libraries
    outside_bytes: int = 0
    # Peak of the allocator, and peak of the tensors in it. None for frameworks without such figures, which
    # are all except PyTorch
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    cap_bytes: int = 0  # limit of the allocator
    num_retries: int = 0  # number of times that the allocator returned its cache in order to go on
    # True if the allocator was empty at the start of the call. Otherwise it may keep memory of an earlier
    # call of the same worker, which says nothing about this call
    is_first: bool = True

    @property
    def is_near_cap(self) -> bool:
        """True if the call nearly ran out of memory, or would have been faster with a little more."""
        is_full = (self.allocated_bytes or 0) > _NEARLY_ALL * self.cap_bytes
        return self.allocated_bytes is not None and (is_full or self.num_retries > _MANY_RETRIES)


def footprint_bytes(call: Measured, spare: float = LEAST_SPARE) -> int:
    """Return the footprint of one call, without the margin.

    ``spare``: bytes of the allocator for each byte of tensors, learned from earlier calls of the task.
    """
    if call.allocated_bytes is None or call.reserved_bytes is None:
        return call.peak_bytes
    if call.is_near_cap:
        return call.outside_bytes + max(call.reserved_bytes, call.cap_bytes)
    needed = call.outside_bytes + int(call.allocated_bytes * spare) + _BLOCKS_BYTES
    if call.is_first:
        # The margin is added to the footprint later, so it is subtracted from the step here.
        step = call.outside_bytes + int(call.reserved_bytes * _LARGEST_STEP)
        needed = max(needed, step - max(int(step * MARGIN / (1 + MARGIN)), LEAST_MARGIN_BYTES))
    # The call succeeded with this much, so it is enough.
    return min(needed, call.outside_bytes + call.reserved_bytes)


def spare_after(call: Measured, spare: float) -> float:
    """Return the spare updated for one more call. It never decreases."""
    return more_spare(spare, call.cap_bytes, call.allocated_bytes or 0) if call.is_near_cap else spare


def more_spare(spare: float, needed_bytes: int, tensors_bytes: int) -> float:
    """Return the spare updated for a call that needed ``needed_bytes`` to hold ``tensors_bytes``."""
    if tensors_bytes <= 0:
        return spare
    return max(spare, min(MOST_SPARE, needed_bytes / tensors_bytes))


def needed_bytes(footprint: int) -> int:
    """Return the size of a request: the footprint plus the margin."""
    return footprint + max(int(footprint * MARGIN), LEAST_MARGIN_BYTES)


def cautious_bytes(total_bytes: int) -> int:
    """Return the assumed main memory of a call without measurements.

    A third of the total, so that at most three calls of a task start at the same time. On a large host the
    limit of 4 GiB lets more of them start.
    """
    return min(total_bytes // 3, _CAUTIOUS_BYTES)


def is_context(number_bytes: int) -> bool:
    """Return True if a CUDA context can have this size."""
    return LEAST_CONTEXT_BYTES <= number_bytes <= MOST_CONTEXT_BYTES


# Keys -------------------------------------------------------------------------------------------------------

# Parts of the names of settings that affect memory. Short ones match as whole words, since "silent" contains
# "len".
_PARTS = "batch|size|seq|length|image|resol|layer|width|height|hidden|depth|channel|token|patch"
_SIZE = re.compile(rf"{_PARTS}|(?<![a-z])(?:len|dims?|img|bs)(?![a-z])")
_PRECISION = re.compile(r"precision|dtype|(?<![a-z])(?:amp|bf16|fp16)(?![a-z0-9])")
_NUMBERS = re.compile(r"\d{1,9}(?:[x,* ]{1,3}\d{1,9}){0,3}", re.ASCII)
_LONGEST_TEXT = 64

# Short names of dtypes; other dtypes keep their names
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class ShapedArray(Protocol):
    """Any array with a shape and a dtype: numpy arrays, tensors, Flower's arrays."""

    @property
    def shape(self) -> Sequence[int]:
        """Length of each dimension."""

    @property
    def dtype(self) -> Any:
        """Element type."""


@dataclass(frozen=True)
class Key:
    """Identifies the footprint of a call. Calls with equal keys are assumed to need the same memory."""

    task: str  # name of the task's function
    weights: str  # number, dtype and digest of the weights: ``"11.2M parameters f32 ab12cd34"``
    gpu: str  # model of the GPU, :data:`ON_CPU` or :data:`BESIDE_GPU`
    sizes: tuple[tuple[str, int | str], ...] = ()  # settings that affect memory, sorted by name

    def on(self, gpu: str) -> Key:
        """Return the key for another model of GPU."""
        return replace(self, gpu=gpu)


def key_of(task: str, arrays: Sequence[ShapedArray], settings: Mapping[str, Any], gpu: str = "") -> Key:
    """Return the key of a call.

    ``task``: name of the task's function.
    ``arrays``: the weights, of which only shapes, dtypes and order matter.
    ``settings``: the user's config of the call, see :func:`sizes_of`.
    ``gpu``: model of the GPU.
    """
    return Key(task, _describe(arrays), gpu, sizes_of(settings))


def sizes_of(settings: Mapping[str, Any]) -> tuple[tuple[str, int | str], ...]:
    """Return the settings of a config that affect the memory of a call, sorted by name.

    These are:

    - settings with a size in their name (batch, size, seq, length, image, resolution, layer, width, height,
      hidden, depth, channel, token, patch, len, dim, img, bs), if the value is a whole number or a text of
      numbers such as ``"224x224"``
    - settings with a precision in their name (precision, dtype, amp, bf16, fp16), if the value is a bool or a
      text of up to 64 characters

    Fractions are left out, because they are usually rates. A learning rate that changes from round to round
    would give each round a new key.
    """
    sizes: dict[str, int | str] = {}
    for name, value in settings.items():
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # imageSize
        if _PRECISION.search(text) and isinstance(value, bool | str) and len(str(value)) <= _LONGEST_TEXT:
            sizes[name] = str(value)
        elif _SIZE.search(text) and isinstance(value, Integral) and not isinstance(value, bool):
            sizes[name] = int(value)
        elif _SIZE.search(text) and isinstance(value, str) and _NUMBERS.fullmatch(value):
            sizes[name] = value
    return tuple(sorted(sizes.items()))


def _describe(arrays: Sequence[ShapedArray]) -> str:
    counts: dict[str, int] = {}
    digest = hashlib.sha256()
    for array in arrays:
        dtype = str(array.dtype).removeprefix("torch.")
        shape = tuple(int(length) for length in array.shape)
        counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
        digest.update(f"{dtype}{shape}".encode())
    if not counts:
        return "no weights"
    main_dtype = max(counts, key=lambda dtype: counts[dtype])
    name = _SHORT.get(main_dtype, main_dtype)
    return f"{_shortened(sum(counts.values()))} parameters {name} {digest.hexdigest()[:8]}"


def _shortened(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
