"""GPU memory as PyTorch sees it in this process: the cap on it, and the figures.

Nothing here starts CUDA, except for :func:`no_cuda_reason`. Running out of it: :mod:`.out_of_memory`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flower_gpu.errors import ConfigError
from flower_gpu.pytorch.out_of_memory import (
    classify,
    device_index,
    is_out_of_memory,
    out_of_memory_in,
    requested_bytes,
)

__all__ = [
    "Cap",
    "Figures",
    "Hold",
    "begin_figures",
    "classify",
    "device_index",
    "figures",
    "fraction_of",
    "hold_to",
    "is_out_of_memory",
    "no_cuda_reason",
    "out_of_memory_in",
    "requested_bytes",
    "reserved_bytes",
]

_FRACTION = re.compile(r"per_process_memory_fraction\s*:\s*([^,\s]+)")


@dataclass(frozen=True)
class Cap:
    """What this process may allocate of one GPU.

    Parameters
    ----------
    cap_bytes : int
        Without the CUDA context.
    total_bytes : int
        Memory of the GPU as NVML tells it.
    """

    cap_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Figures:
    """PyTorch's memory on one GPU.

    Parameters
    ----------
    reserved_bytes, peak_reserved_bytes : int
        What its allocator has, or had at most, from the driver.
    allocated_bytes, peak_allocated_bytes : int
        What tensors have of that, or had at most.
    free_bytes : int or None
        What nobody uses of the GPU; None where this process has no context on it.
    total_bytes : int
        All there is, as CUDA shows it.
    num_ooms, num_alloc_retries : int
        How often it ran out of memory, and how often it gave back what it kept and tried again.
    """

    reserved_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    free_bytes: int | None
    total_bytes: int
    num_ooms: int
    num_alloc_retries: int


class Hold:
    """The cap of this process, from :func:`hold_to` on."""

    def __init__(
        self,
        caps: Sequence[Cap],
        settings: Callable[[], str | None],
        own: Callable[[], float | None],
        on_start: Callable[[], None],
    ) -> None:
        self._caps = caps
        self._on_start = on_start
        self._is_awaited = False
        self._settings = settings
        self._own = own
        self._before: str | None = None
        self._fractions: dict[int, float] = {}

    def apply(self) -> None:
        """Apply the cap now, or as soon as CUDA starts."""
        if _started():
            self.when_started()
        else:
            # The very first thing that Python does on a GPU. It is needed although there are the settings:
            # PyTorch before 2.10 has none for this, one number cannot be right for several GPUs, and user
            # code often changes the settings in os.environ when the environment is long set.
            self._is_awaited = True
            torch.cuda._lazy_call(self.when_started)  # type: ignore[no-untyped-call]

    def follow_settings(self) -> None:
        """Give PyTorch the settings of the environment, cap included, where it does not have them.

        PyTorch reads the environment once, when its settings are first used. A fork of a process that has
        done so has that process's settings.
        """
        wanted = self._settings()
        if wanted is None or not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            return
        try:
            present = torch._C._accelerator_getAllocatorSettings()
            if present != wanted:
                self._before = present if self._before is None else self._before
                torch._C._accelerator_setAllocatorSettings(wanted)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"PyTorch does not take PYTORCH_ALLOC_CONF={wanted!r} ({reason}). Correct it; the backend "
                "can only be chosen with start_method='spawn', before PyTorch is loaded"
            ) from error

    def when_started(self) -> None:
        """Set each GPU's cap; CUDA has started."""
        if self._is_awaited:
            self._is_awaited = False
            self._on_start()
        self.follow_settings()
        own = self._own()
        for index, cap in enumerate(self._caps[: torch.cuda.device_count()]):
            fraction = fraction_of(cap.cap_bytes, torch.cuda.get_device_properties(index).total_memory)
            self._fractions[index] = fraction if own is None else min(own, fraction)
            torch._C._cuda_setMemoryFraction(self._fractions[index], index)

    def in_force_bytes(self) -> list[int | None]:
        """Read back what PyTorch's allocator takes of each GPU at most; None where that cannot be told."""
        if _started():
            return [_in_force(index) for index in range(min(len(self._caps), torch.cuda.device_count()))]
        if self._settings() is None:
            return [None] * len(self._caps)
        found = _FRACTION.findall(torch._C._accelerator_getAllocatorSettings())
        return [int(float(found[-1]) * cap.total_bytes) if found else None for cap in self._caps]

    def release(self) -> None:
        """Take the cap away again, where this process goes on without the lease."""
        calls: list[Any] = torch.cuda._queued_calls
        calls[:] = [call for call in calls if call[0] != self.when_started]
        for index in self._fractions:
            torch._C._cuda_setMemoryFraction(1.0, index)
        if self._before is not None:
            # A setting that is not named keeps its value.
            named = "" if _FRACTION.search(self._before) else "per_process_memory_fraction:1.0"
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [self._before, named])))


def hold_to(
    caps: Sequence[Cap],
    settings: Callable[[], str | None] = lambda: None,
    own: Callable[[], float | None] = lambda: None,
    on_start: Callable[[], None] = lambda: None,
) -> Hold:
    """Hold this process's allocator to caps, without starting CUDA.

    Parameters
    ----------
    caps : sequence of Cap
        For each GPU that this process sees, in CUDA's order.
    settings : callable
        Returns what ``PYTORCH_ALLOC_CONF`` should say with the cap in it, as the environment is now; None
        where this PyTorch knows no such setting. Asked again when CUDA starts.
    own : callable
        Returns the smaller fraction of a GPU that the user wants, if any. Asked when CUDA starts.
    on_start : callable
        Called when CUDA starts, if it has not started yet.

    Returns
    -------
    Hold
        To read the cap back, or to end it.
    """
    hold = Hold(tuple(caps), settings, own, on_start)
    hold.apply()
    return hold


def fraction_of(cap_bytes: int, total_bytes: int) -> float:
    """Return the largest fraction with which PyTorch allows no more than ``cap_bytes``."""
    fraction = min(1.0, max(0, cap_bytes) / total_bytes) if total_bytes > 0 else 0.0
    # PyTorch multiplies and cuts off (setMemoryFraction in CUDACachingAllocator.cpp).
    while fraction > 0 and int(fraction * total_bytes) > cap_bytes:
        fraction -= 2**-53
    return fraction


def reserved_bytes() -> list[int] | None:
    """Return what PyTorch's allocator has of each GPU now; None where CUDA has not started.

    Asks the allocator and not the driver, so that another thread can do it at any time, also while a CUDA
    graph is captured.
    """
    if not _started():
        return None
    return [torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())]


def figures() -> tuple[Figures, ...] | None:
    """Return the memory figures of each GPU this process sees; None where CUDA has not started."""
    if not _started():
        return None
    return tuple(_figures(index) for index in range(torch.cuda.device_count()))


def begin_figures() -> tuple[Figures, ...] | None:
    """Return the figures, and let the highest ones be those from now on: of one call of several in a row."""
    found = figures()
    for index in range(len(found or ())):
        torch.cuda.reset_peak_memory_stats(index)
    return found


def _started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _figures(index: int) -> Figures:
    stats = torch.cuda.memory_stats(index)
    free = None
    if torch._C._cuda_hasPrimaryContext(index):  # to ask for the free memory would make one
        free = torch.cuda.mem_get_info(index)[0]
    return Figures(
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
        peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        free_bytes=free,
        total_bytes=torch.cuda.get_device_properties(index).total_memory,
        num_ooms=stats.get("num_ooms", 0),
        num_alloc_retries=stats.get("num_alloc_retries", 0),
    )


def _in_force(index: int) -> int | None:
    get = getattr(torch._C, "_cuda_getMemoryFraction", None)  # from 2.6 on
    if get is None:
        return None
    try:
        return int(get(index) * torch.cuda.get_device_properties(index).total_memory)
    except RuntimeError:  # an allocator that cannot tell
        return None


def no_cuda_reason() -> str | None:
    """Return why this PyTorch cannot use a GPU; None where it can. May start NVML, or the CUDA driver."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build without CUDA"
    if _started() or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        text = str(error).partition("\n")[0]
        return f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: {text}"
    return None
