"""A description of the machine, without anything that identifies it."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def describe() -> dict[str, Any]:
    """Return counts, models and versions, without importing torch or flwr."""
    # The rest of the release may name a distribution or a cloud.
    kernel = re.match(r"[\d.]*\d", platform.release())
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "gpus": gpu_models(),
        "kernel": kernel[0] if kernel else "unknown",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "flwr", "numpy", "loky", "ray", "flower-gpu")},
    }


def gpu_models() -> list[str]:
    """Return the model names of the GPUs; empty without a GPU or its driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = map(pynvml.nvmlDeviceGetName, handles)
        return [name.decode() if isinstance(name, bytes) else name for name in names]
    finally:
        pynvml.nvmlShutdown()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
