"""What the figures were measured on, without anything that identifies the machine."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def describe() -> dict[str, Any]:
    """Return counts, models and versions; imports neither torch nor flwr."""
    kernel = re.match(r"[\d.]*\d", platform.release())  # the rest may name a distribution or a cloud
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "gpus": gpu_models(),
        "kernel": kernel[0] if kernel else "unknown",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "flwr", "numpy", "loky", "ray", "flower-gpu")},
    }


def gpu_models() -> list[str]:
    """Return the model names of the GPUs here; empty without a GPU or its driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
