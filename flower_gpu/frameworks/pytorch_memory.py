"""PyTorch's GPU memory: the cap in its settings, the cap on its allocator, and its figures.

This module does not import PyTorch, and only :func:`no_cuda_reason` may start CUDA. All private names of
PyTorch are looked up here, by :func:`private`.

Sources: "Optimizing memory usage" in PyTorch's CUDA notes, and c10/cuda/CUDAAllocatorConfig.cpp.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, wraps
from typing import Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.frameworks.cuda_answers import ANSWERS
from flower_gpu.frameworks.framework import Cap, Figures, Hold, fraction_of, smaller_fraction

#: Variables with the settings of PyTorch's allocator. If both are set, PyTorch ignores the new one.
SETTINGS: Final = "PYTORCH_ALLOC_CONF"
OLD_SETTINGS: Final = "PYTORCH_CUDA_ALLOC_CONF"

#: The setting that limits the memory of PyTorch's allocator.
FRACTION: Final = "per_process_memory_fraction"

# The first version with that setting (pytorch#161035). Older ones raise an error for unknown settings.
_FRACTION_SINCE: Final = (2, 10)

_IN_FORCE = re.compile(FRACTION + r"\s*:\s*([^,\s]+)")

_SET: Final = "_C._accelerator_setAllocatorSettings"
_GET: Final = "_C._accelerator_getAllocatorSettings"

# Private names: the versions of PyTorch in which each was found, and the effect if it is missing
_NOT_PUBLIC: Final = {
    "cuda._lazy_call": ("2.6 to 2.14", "a GPU is capped by PYTORCH_ALLOC_CONF only"),
    "_C._cuda_hasPrimaryContext": ("2.6 to 2.14", "why memory has run out on a GPU stays unclear"),
    _SET: ("2.10 to 2.14", "settings of its allocator from before a call stay until CUDA starts"),
    _GET: ("2.12 to 2.14", "a cap cannot be read back before CUDA starts"),
    "_GLOBAL_DEVICE_CONTEXT": ("2.6 to 2.14", "workers do not take over the default device of their caller"),
}

_missing: dict[str, None] = {}  # private names that this process needed and did not find
_pending: list[AllocatorHold] = []  # holds that set their cap when CUDA starts in this process
_active: list[AllocatorHold] = []  # holds that have set a cap in this process


class AllocatorHold(Hold):
    """The cap on PyTorch's allocator."""

    def __init__(self, caps: Sequence[Cap]) -> None:
        self._caps = caps
        self._fraction = fraction_of(caps)
        self._is_awaited = False
        self._previous: str | None = None  # settings to restore
        self._fractions: dict[int, float] = {}

    def apply(self) -> None:
        """Apply the cap now, or as soon as CUDA starts."""
        torch = _torch()
        _keep_caps()
        if torch.cuda.is_initialized():
            self.when_started()
        else:
            # Runs before any other use of a GPU. The variables alone are not enough: PyTorch before 2.10 has
            # no such setting, one number cannot be right for several GPUs, and user code often changes the
            # settings in os.environ.
            self._is_awaited = True
            ANSWERS.count_leased(True)
            _pending.append(self)
            _await_start()

    def follow_settings(self) -> None:
        """Pass the settings of the environment, including the cap, to PyTorch.

        PyTorch reads the environment only once, at the first use of its settings. A fork inherits the
        settings that its parent has read.
        """
        wanted = self._settings()
        set_settings = None if wanted is None else private(_SET)
        if set_settings is None:
            return
        try:
            get_settings = private(_GET, is_needed=False)
            present = "" if get_settings is None else get_settings()
            if present != wanted:
                self._previous = present if self._previous is None else self._previous
                set_settings(wanted)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"PyTorch does not take PYTORCH_ALLOC_CONF={wanted!r} ({reason}). Correct it; the backend "
                "can only be chosen with start_method='spawn', before PyTorch is loaded"
            ) from error

    def when_started(self) -> None:
        """Set the cap on each GPU, after CUDA has started."""
        torch = _torch()
        if self._is_awaited:
            self._is_awaited = False
            ANSWERS.count_leased(False)
        self.follow_settings()
        of_user = users_fraction(self._fraction, os.environ)
        _active.append(self)
        for index, cap in enumerate(self._caps[: torch.cuda.device_count()]):
            fraction = largest_fraction(cap.cap_bytes, torch.cuda.get_device_properties(index).total_memory)
            self._fractions[index] = fraction if of_user is None else min(of_user, fraction)
            torch.cuda.set_per_process_memory_fraction(self._fractions[index], index)

    def allowed_fraction(self, index: int) -> float:
        """Return the largest fraction of a GPU that the cap allows."""
        return self._fractions.get(index, 1.0)

    def in_force_bytes(self) -> list[int | None]:
        """Return the limit of the allocator on each GPU, as PyTorch reports it, or None if it does not."""
        torch = _torch()
        if torch.cuda.is_initialized():
            return [_in_force(index) for index in range(min(len(self._caps), torch.cuda.device_count()))]
        if self._settings() is None or (get_settings := private(_GET)) is None:
            return [None] * len(self._caps)
        fractions = _IN_FORCE.findall(get_settings())
        return [int(float(fractions[-1]) * cap.total_bytes) if fractions else None for cap in self._caps]

    def release(self) -> None:
        """Remove the cap, in a process that goes on without the lease."""
        torch = _torch()
        ANSWERS.count_leased(False)
        for holds in (_pending, _active):
            if self in holds:
                holds.remove(self)
        for index in self._fractions:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        if self._previous is not None and (set_settings := private(_SET)) is not None:
            # A setting without a new value keeps its old one, so the fraction is named.
            fraction = "" if _IN_FORCE.search(self._previous) else f"{FRACTION}:1.0"
            set_settings(",".join(filter(None, [self._previous, fraction])))

    def _settings(self) -> str | None:
        """Return the settings of the environment with the cap, or None if PyTorch has no setting for it."""
        # From torch itself, because looking up an installed version takes several milliseconds.
        if not knows_fraction(str(_torch().__version__)):
            return None
        merged = settings_with_cap(self._fraction, os.environ)
        # The task's module may have set the old variable, which takes precedence. Set in os.environ, so that
        # child processes of the task get the cap as well.
        os.environ[OLD_SETTINGS if OLD_SETTINGS in os.environ else SETTINGS] = merged
        return merged


def _keep_caps() -> None:
    """Limit ``torch.cuda.set_per_process_memory_fraction`` to the caps of this process.

    Training code for a whole GPU calls it with 1.0, or with the GPU fraction of a Ray actor. That would
    remove the cap, and the process could use the memory of other leases.
    """
    torch = _torch()
    original = torch.cuda.set_per_process_memory_fraction
    if hasattr(original, "keeps_caps"):
        return

    @wraps(original)
    def set_per_process_memory_fraction(fraction: Any, device: Any = None) -> None:
        torch.cuda.init()  # as the original does; the fractions of the caps are known after it
        index = device if isinstance(device, int | None) else torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        allowed = min((hold.allowed_fraction(index) for hold in _active), default=1.0)
        # PyTorch refuses invalid values itself.
        if isinstance(fraction, float) and allowed < fraction <= 1.0:
            warnings.warn(
                f"set_per_process_memory_fraction({fraction:g}) has no effect: the lease of this call grants "
                f"{allowed:.3g} of the GPU's memory, and that stays the limit. For more, set gpu_memory or "
                "num_gpus (--gpu-memory, --num-gpus)",
                RuntimeWarning,
                stacklevel=2,
            )
            fraction = allowed
        original(fraction, device)

    set_per_process_memory_fraction.keeps_caps = True  # type: ignore[attr-defined]
    for module in (torch.cuda, torch.cuda.memory):
        module.set_per_process_memory_fraction = set_per_process_memory_fraction


def settings_with_cap(fraction: str, environ: Mapping[str, str]) -> str:
    """Return the user's settings of PyTorch's allocator in ``environ``, merged with the cap.

    Raises ConfigError if the user's cap is not a number from 0 to 1.
    """
    name = OLD_SETTINGS if OLD_SETTINGS in environ else SETTINGS
    text = environ.get(name, "")
    entries = _entries(text)
    if any((key, value) == ("backend", "cudaMallocAsync") for _, key, value in entries):
        # This backend ignores the setting and warns about it. It gets the cap when CUDA starts.
        return text
    of_user = [value for _, key, value in entries if key == FRACTION]
    others = [entry for entry, key, _ in entries if key != FRACTION]
    cap = smaller_fraction(fraction, of_user[-1] if of_user else None, name)
    return ",".join([*others, f"{FRACTION}:{cap}"])


def users_fraction(fraction: str, environ: Mapping[str, str]) -> float | None:
    """Return the user's own cap if it is smaller than ``fraction``, or None."""
    entries = _entries(environ.get(OLD_SETTINGS, environ.get(SETTINGS, "")))
    of_user = [float(value) for _, key, value in entries if key == FRACTION]
    return of_user[-1] if of_user and of_user[-1] < float(fraction) else None


def _entries(text: str) -> list[tuple[str, str, str]]:
    """Return each entry of the settings with its name and value. Commas in brackets are part of an entry."""
    entries = (entry.strip() for entry in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text))
    split = ((entry, *entry.partition(":")[::2]) for entry in entries if entry)
    return [(entry, key.strip(), value.strip()) for entry, key, value in split]


def knows_fraction(version: str) -> bool:
    """Return True if this version of PyTorch reads its cap from the environment."""
    match = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(a|b|rc|\.?dev)?", version)
    if not match:
        return False
    number = int(match[1]), int(match[2])
    # A pre-release of the first version with the setting may still lack it.
    return number > _FRACTION_SINCE or (number == _FRACTION_SINCE and not match[3])


def largest_fraction(cap_bytes: int, total_bytes: int) -> float:
    """Return the largest fraction for which PyTorch allows at most ``cap_bytes``."""
    fraction = min(1.0, max(0, cap_bytes) / total_bytes) if total_bytes > 0 else 0.0
    # PyTorch multiplies and truncates (setMemoryFraction in CUDACachingAllocator.cpp).
    while fraction > 0 and int(fraction * total_bytes) > cap_bytes:
        fraction -= 2**-53
    return fraction


def figures() -> tuple[Figures, ...] | None:
    """Return the memory figures of each visible GPU, or None before CUDA has started."""
    cuda = _torch().cuda
    return tuple(map(_figures, range(cuda.device_count()))) if cuda.is_initialized() else None


def _figures(index: int) -> Figures:
    torch = _torch()
    stats = torch.cuda.memory_stats(index)
    free = None
    has_context = private("_C._cuda_hasPrimaryContext")
    # Asking for the free memory would create a context.
    if has_context is not None and has_context(index):
        free = torch.cuda.mem_get_info(index)[0]
    return Figures(
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
        peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        free_bytes=free,
        total_bytes=torch.cuda.get_device_properties(index).total_memory,
        num_alloc_retries=stats.get("num_alloc_retries", 0),
        num_ooms=stats.get("num_ooms", 0),
    )


def _in_force(index: int) -> int | None:
    cuda = _torch().cuda
    try:
        fraction = cuda.get_per_process_memory_fraction(index)
        return int(fraction * cuda.get_device_properties(index).total_memory)
    except RuntimeError:  # this allocator does not report it
        return None


def no_cuda_reason() -> str | None:
    """Return why this PyTorch cannot use a GPU, or None if it can. May start NVML or the CUDA driver."""
    torch = _torch()
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build without CUDA"
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:
        text = str(error).partition("\n")[0]
        return f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: {text}"
    return None


def lacks() -> str | None:
    """Return the private names that this process did not find in PyTorch, each with the effect, or None."""
    texts = [f"torch.{name} (seen in {_NOT_PUBLIC[name][0]}): {_NOT_PUBLIC[name][1]}" for name in _missing]
    return f"PyTorch {_torch().__version__} has no {'; no '.join(texts)}" if texts else None


def private(name: str, *, is_needed: bool = True) -> Any:
    """Return PyTorch's object with a name in ``_NOT_PUBLIC``, or None."""
    attribute = _torch()
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    if attribute is None and is_needed:
        _missing[name] = None
    return attribute


@cache  # PyTorch remembers the call, also in forks
def _await_start() -> None:
    if (call := private("cuda._lazy_call")) is not None:
        call(_when_started)


def _when_started() -> None:
    for hold in _pending:
        hold.when_started()
    _pending.clear()


def _torch() -> Any:
    return sys.modules["torch"]
