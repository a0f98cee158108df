"""What PyTorch says of GPUs in a process that others are forked from: it asks NVML, and CUDA stays untouched.

Modules often begin with ``DEVICE = "cuda" if torch.cuda.is_available() else "cpu"``. That starts CUDA, after
which no fork can use a GPU. PyTorch can ask NVML by itself, but starts CUDA all the same where NVML fails or
a MIG device is visible.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from flower_gpu.frameworks.framework import AfterImport
from flower_gpu.frameworks.pytorch_memory import count_by_nvml

_LIBRARY = "libnvidia-ml.so.1"

_asks_nvml = False
_has_asked = False
_waits_for_torch = False


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


def has_asked() -> bool:
    """Tell whether some module of this process wanted to know of GPUs while NVML was asked."""
    return _has_asked


def _wrap() -> None:
    torch: Any = sys.modules["torch"]
    if torch.version.cuda is None or hasattr(torch.cuda.device_count, "asks_nvml"):
        return
    _replace(torch.cuda, "device_count", _count)
    _replace(torch.cuda, "is_available", lambda: _count() > 0)


def _replace(cuda: Any, name: str, answer: Callable[[], Any]) -> None:
    original = getattr(cuda, name)

    @wraps(original)
    def asked() -> Any:  # a module may keep it: in a worker it must be what it was
        return answer() if _asks_nvml else original()

    for attribute in ("cache_clear", "cache_info"):  # of a version of PyTorch that remembers the count
        if hasattr(original, attribute):
            setattr(asked, attribute, getattr(original, attribute))
    vars(asked)["asks_nvml"] = True
    setattr(cuda, name, asked)


def _count() -> int:
    """Count the GPUs that CUDA would show, as far as NVML can tell; none where it cannot."""
    global _has_asked
    _has_asked = True
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return 0
    try:
        if (visible or "").startswith("MIG-"):  # CUDA uses the first; PyTorch knows no count of them
            return min(1, max(0, count_by_nvml(are_mig=True)))
        return max(0, count_by_nvml(are_mig=False))
    except (OSError, AttributeError):  # a library that is no NVML
        return 0
    finally:
        _close_nvml()


def _close_nvml() -> None:
    """Undo PyTorch's start of NVML: a fork of this process would inherit its open device files."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(_LIBRARY).nvmlShutdown()
