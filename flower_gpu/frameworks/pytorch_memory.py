"""GPU memory as PyTorch sees it: the cap in its settings, the cap on this process, and the figures.

Nothing here imports it, or starts CUDA but for :func:`no_cuda_reason`. What PyTorch has no public function
for is asked for here only, by :func:`private`.

Sources: "Optimizing memory usage" in PyTorch's CUDA notes, and c10/cuda/CUDAAllocatorConfig.cpp.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.frameworks.cuda_answers import ANSWERS
from flower_gpu.frameworks.framework import Cap, Figures, Hold, fraction_of, smaller_fraction

#: Where PyTorch reads its allocator's settings. Where both are set the old name wins, and as a whole.
SETTINGS: Final = "PYTORCH_ALLOC_CONF"
OLD_SETTINGS: Final = "PYTORCH_CUDA_ALLOC_CONF"

#: The setting that caps what PyTorch's allocator takes of a GPU.
FRACTION: Final = "per_process_memory_fraction"

# An unknown setting makes PyTorch raise an error when CUDA starts. This one came with 2.10 (pytorch#161035).
_FRACTION_SINCE: Final = (2, 10)

_IN_FORCE = re.compile(FRACTION + r"\s*:\s*([^,\s]+)")

_SET: Final = "_C._accelerator_setAllocatorSettings"
_GET: Final = "_C._accelerator_getAllocatorSettings"

# Names that are not public: the versions of PyTorch in which each was seen, and what is so without it.
_NOT_PUBLIC: Final = {
    "cuda._lazy_call": ("2.6 to 2.14", "a GPU is capped by PYTORCH_ALLOC_CONF only"),
    "_C._cuda_hasPrimaryContext": ("2.6 to 2.14", "why memory has run out on a GPU stays unclear"),
    _SET: ("2.10 to 2.14", "settings of its allocator from before a call stay until CUDA starts"),
    _GET: ("2.12 to 2.14", "a cap cannot be read back before CUDA starts"),
    "_GLOBAL_DEVICE_CONTEXT": ("2.6 to 2.14", "workers do not take over the default device of their caller"),
}

_lacking: dict[str, None] = {}  # those of them that were needed in this process and not there
_waiting: list[AllocatorHold] = []  # what sets its cap when CUDA starts in this process
_in_force_here: list[AllocatorHold] = []  # the holds that have set a cap in this process


class AllocatorHold(Hold):
    """The cap on PyTorch's allocator."""

    def __init__(self, caps: Sequence[Cap], on_start: Callable[[], None]) -> None:
        self._caps = caps
        self._fraction = fraction_of(caps)
        self._on_start = on_start
        self._is_awaited = False
        self._before: str | None = None
        self._fractions: dict[int, float] = {}

    def apply(self) -> None:
        """Apply the cap now, or as soon as CUDA starts."""
        torch = _torch()
        _keep_caps()
        if torch.cuda.is_initialized():
            self.when_started()
        else:
            # The very first thing that Python does on a GPU. It is needed although there are the settings:
            # PyTorch before 2.10 has none for this, one number cannot be right for several GPUs, and user
            # code often changes the settings in os.environ when the environment is long set.
            self._is_awaited = True
            ANSWERS.count_leased(True)
            _waiting.append(self)
            _await_start()

    def follow_settings(self) -> None:
        """Give PyTorch the settings of the environment, cap included, where it does not have them.

        PyTorch reads the environment once, when its settings are first used. A fork of a process that has
        done so has that process's settings.
        """
        wanted = self._settings()
        give = None if wanted is None else private(_SET)
        if give is None:
            return
        try:
            read = private(_GET, is_needed=False)
            present = "" if read is None else read()
            if present != wanted:
                self._before = present if self._before is None else self._before
                give(wanted)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"PyTorch does not take PYTORCH_ALLOC_CONF={wanted!r} ({reason}). Correct it; the backend "
                "can only be chosen with start_method='spawn', before PyTorch is loaded"
            ) from error

    def when_started(self) -> None:
        """Set each GPU's cap; CUDA has started."""
        torch = _torch()
        if self._is_awaited:
            self._is_awaited = False
            ANSWERS.count_leased(False)
            self._on_start()
        self.follow_settings()
        own = users_fraction(self._fraction, os.environ)
        _in_force_here.append(self)
        for index, cap in enumerate(self._caps[: torch.cuda.device_count()]):
            fraction = largest_fraction(cap.cap_bytes, torch.cuda.get_device_properties(index).total_memory)
            self._fractions[index] = fraction if own is None else min(own, fraction)
            torch.cuda.set_per_process_memory_fraction(self._fractions[index], index)

    def most(self, index: int) -> float:
        """Return the largest fraction of a GPU that the cap allows."""
        return self._fractions.get(index, 1.0)

    def in_force_bytes(self) -> list[int | None]:
        """Read back how much of each GPU the allocator takes at most; None where it cannot tell."""
        torch = _torch()
        if torch.cuda.is_initialized():
            return [_in_force(index) for index in range(min(len(self._caps), torch.cuda.device_count()))]
        if self._settings() is None or (read := private(_GET)) is None:
            return [None] * len(self._caps)
        found = _IN_FORCE.findall(read())
        return [int(float(found[-1]) * cap.total_bytes) if found else None for cap in self._caps]

    def release(self) -> None:
        """Take the cap away again, where this process goes on without the lease."""
        torch = _torch()
        ANSWERS.count_leased(False)
        for holds in (_waiting, _in_force_here):
            if self in holds:
                holds.remove(self)
        for index in self._fractions:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        if self._before is not None and (give := private(_SET)) is not None:
            # A setting that is not named keeps its value.
            named = "" if _IN_FORCE.search(self._before) else f"{FRACTION}:1.0"
            give(",".join(filter(None, [self._before, named])))

    def _settings(self) -> str | None:
        """Return the settings of the environment with the cap in them; None where PyTorch takes no cap so."""
        # To ask for an installed package's version takes several milliseconds.
        if not knows_fraction(str(_torch().__version__)):
            return None
        merged = settings_with_cap(self._fraction, os.environ)
        # The task's module may have set the old name, which wins; processes of the task get the cap, too.
        os.environ[OLD_SETTINGS if OLD_SETTINGS in os.environ else SETTINGS] = merged
        return merged


def _keep_caps() -> None:
    """Have ``torch.cuda.set_per_process_memory_fraction`` keep to the caps of this process.

    Training code that was written for a whole GPU calls it with 1.0, or with the fraction of a GPU that Ray
    would give it. That would take the cap away, and the memory of other leases with it.
    """
    torch = _torch()
    original = torch.cuda.set_per_process_memory_fraction
    if hasattr(original, "keeps_caps"):
        return

    @wraps(original)
    def set_per_process_memory_fraction(fraction: Any, device: Any = None) -> None:
        torch.cuda.init()  # as PyTorch's own does: the caps are known from then on
        index = device if isinstance(device, int | None) else torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        most = min((hold.most(index) for hold in _in_force_here), default=1.0)
        # Anything else is for PyTorch to refuse.
        if isinstance(fraction, float) and most < fraction <= 1.0:
            warnings.warn(
                f"set_per_process_memory_fraction({fraction:g}) has no effect: the lease of this call grants "
                f"{most:.3g} of the GPU's memory, and that stays the limit. A larger lease is gpu_memory or "
                "num_gpus (--gpu-memory, --num-gpus)",
                RuntimeWarning,
                stacklevel=2,
            )
            fraction = most
        original(fraction, device)

    set_per_process_memory_fraction.keeps_caps = True  # type: ignore[attr-defined]
    for module in (torch.cuda, torch.cuda.memory):
        module.set_per_process_memory_fraction = set_per_process_memory_fraction


def settings_with_cap(fraction: str, environ: Mapping[str, str]) -> str:
    """Return the user's settings of PyTorch's allocator in ``environ`` with the cap in them.

    Raises ConfigError if the user's own cap is not a number from 0 to 1.
    """
    name = OLD_SETTINGS if OLD_SETTINGS in environ else SETTINGS
    text = environ.get(name, "")
    entries = _entries(text)
    if any((key, value) == ("backend", "cudaMallocAsync") for _, key, value in entries):
        # It ignores the cap of its settings, and warns; it has the one that is set when CUDA starts.
        return text
    own = [value for _, key, value in entries if key == FRACTION]
    others = [entry for entry, key, _ in entries if key != FRACTION]
    cap = smaller_fraction(fraction, own[-1] if own else None, name)
    return ",".join([*others, f"{FRACTION}:{cap}"])


def users_fraction(fraction: str, environ: Mapping[str, str]) -> float | None:
    """Return the cap that a user has set to less than ``fraction``; None where nobody has."""
    entries = _entries(environ.get(OLD_SETTINGS, environ.get(SETTINGS, "")))
    own = [float(value) for _, key, value in entries if key == FRACTION]
    return own[-1] if own and own[-1] < float(fraction) else None


def _entries(text: str) -> list[tuple[str, str, str]]:
    """Return each entry of settings, its name and its value; commas inside of brackets belong to an entry."""
    entries = (entry.strip() for entry in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text))
    split = ((entry, *entry.partition(":")[::2]) for entry in entries if entry)
    return [(entry, key.strip(), value.strip()) for entry, key, value in split]


def knows_fraction(version: str) -> bool:
    """Tell whether this version of PyTorch takes its cap from the environment."""
    found = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(a|b|rc|\.?dev)?", version)
    if not found:
        return False
    number = int(found[1]), int(found[2])
    # A pre-release of that very version may be older than the setting.
    return number > _FRACTION_SINCE or (number == _FRACTION_SINCE and not found[3])


def largest_fraction(cap_bytes: int, total_bytes: int) -> float:
    """Return the largest fraction with which PyTorch allows no more than ``cap_bytes``."""
    fraction = min(1.0, max(0, cap_bytes) / total_bytes) if total_bytes > 0 else 0.0
    # PyTorch multiplies and cuts off (setMemoryFraction in CUDACachingAllocator.cpp).
    while fraction > 0 and int(fraction * total_bytes) > cap_bytes:
        fraction -= 2**-53
    return fraction


def figures() -> tuple[Figures, ...] | None:
    """Return the memory figures of each GPU this process sees; None where CUDA has not started."""
    cuda = _torch().cuda
    return tuple(map(_figures, range(cuda.device_count()))) if cuda.is_initialized() else None


def _figures(index: int) -> Figures:
    torch = _torch()
    stats = torch.cuda.memory_stats(index)
    free = None
    has_context = private("_C._cuda_hasPrimaryContext")
    if has_context is not None and has_context(index):  # to ask for the free memory would make one
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
    except RuntimeError:  # an allocator that cannot tell
        return None


def no_cuda_reason() -> str | None:
    """Return why this PyTorch cannot use a GPU; None where it can. May start NVML, or the CUDA driver."""
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
    """Return the private names that this process did not find in PyTorch, each with the effect."""
    texts = [f"torch.{name} (seen in {_NOT_PUBLIC[name][0]}): {_NOT_PUBLIC[name][1]}" for name in _lacking]
    return f"PyTorch {_torch().__version__} has no {'; no '.join(texts)}" if texts else None


def private(name: str, *, is_needed: bool = True) -> Any:
    """Return PyTorch's object of a name in ``_NOT_PUBLIC``, or None."""
    found = _torch()
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None and is_needed:
        _lacking[name] = None
    return found


@cache  # PyTorch keeps the call for the process, and for its forks
def _await_start() -> None:
    if (call := private("cuda._lazy_call")) is not None:
        call(_when_started)


def _when_started() -> None:
    for hold in _waiting:
        hold.when_started()
    _waiting.clear()


def _torch() -> Any:
    return sys.modules["torch"]
