"""What PyTorch says of GPUs: it asks NVML, and CUDA stays untouched.

Modules often begin with ``DEVICE = "cuda" if torch.cuda.is_available() else "cpu"``. That starts CUDA, after
which no fork can use a GPU. PyTorch can ask NVML by itself, but starts CUDA all the same where NVML fails or
a MIG device is visible. And it looks at all cards: where one of them cannot be opened it warns, and counts
none, though that is another one's, by the GPU guard or a control group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from flower_gpu.frameworks.framework import AfterImport
from flower_gpu.gpu import inventory
from flower_gpu.gpu.nvml import NO_DRIVER

_asks_nvml = False
_has_asked = False
_waits_for_torch = False
_has_lease = False


def ask_nvml() -> None:
    """Have ``is_available`` and ``device_count`` of ``torch.cuda`` ask NVML, also if it is imported later."""
    global _asks_nvml, _waits_for_torch
    _asks_nvml = True
    if "torch" in sys.modules:
        _wrap()
    elif not _waits_for_torch:
        _waits_for_torch = True
        AfterImport.begin("torch", _wrap)


def ask_cuda() -> None:
    """Have them ask CUDA again, in a fork that may start it."""
    global _asks_nvml
    _asks_nvml = False


def count_leased(has_lease: bool) -> None:
    """Have ``device_count`` look at the GPUs of this worker's lease only; CUDA has not started there."""
    global _has_lease
    _has_lease = has_lease
    _wrap()


def has_asked() -> bool:
    """Tell whether some module of this process wanted to know of GPUs while NVML was asked."""
    return _has_asked


def _wrap() -> None:
    torch: Any = sys.modules["torch"]
    if torch.version.cuda is None or hasattr(torch.cuda.device_count, "asks_nvml"):
        return
    count = torch.cuda.device_count
    _replace(torch.cuda, "device_count", _count, lambda: _count_leased() or count())
    _replace(torch.cuda, "is_available", lambda: _count() > 0, torch.cuda.is_available)


def _replace(cuda: Any, name: str, in_server: Callable[[], Any], in_worker: Callable[[], Any]) -> None:
    original = getattr(cuda, name)

    @wraps(original)
    def asked() -> Any:  # a module may keep it: in a worker it must be what it was
        return in_server() if _asks_nvml else in_worker()

    for attribute in ("cache_clear", "cache_info"):  # of a version of PyTorch that remembers the count
        if hasattr(original, attribute):
            setattr(asked, attribute, getattr(original, attribute))
    vars(asked)["asks_nvml"] = True
    setattr(cuda, name, asked)


def _count_leased() -> int:
    """Count the GPUs of the lease; 0 where there is none, CUDA has started and knows, or NVML does not."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len(inventory.take_of(visible.split(","))) if _has_lease else 0


def _count() -> int:
    """Count the GPUs that CUDA would show: those that NVML can open."""
    global _has_asked
    _has_asked = True
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return 0
    found = inventory.take_here()
    cards = [gpu for gpu in found.visible(visible) if gpu.uuid]
    whole = [gpu for gpu in cards if gpu.mig_parent is None]
    count = len(whole) or min(1, len(cards))  # of MIG devices CUDA uses one
    if not count:
        broken = next((f"GPU {gpu.index}: {gpu.problem}" for gpu in found.gpus if gpu.problem), "")
        if reason := found.problem or broken:
            _say_none(reason)
    return count


@cache
def _say_none(reason: str) -> None:
    if not reason.startswith(NO_DRIVER):
        print(
            "flower-gpu: a module that workers find imported has asked for GPUs, and was told that there is "
            f"none ({reason}). If it chooses its device when it is imported, that is the CPU",
            file=sys.stderr,
            flush=True,
        )
