"""The PyTorch that is installed, by its version. Importing this imports no torch."""

from __future__ import annotations

import pytest
from packaging.version import Version

from flower_gpu.frameworks import pytorch, pytorch_memory

VERSION = Version(pytorch.installed_version() or "0")

#: Whether it takes a cap from its settings, and whether it tells these.
TAKES_CAP = pytorch_memory.knows_fraction(str(VERSION))
TELLS_SETTINGS = Version("2.12") <= VERSION


def with_cap(fraction: str, own: str = "") -> str | None:
    """Return what PYTORCH_ALLOC_CONF is in a worker with this cap; None: not set."""
    cap = f"per_process_memory_fraction:{fraction}" if TAKES_CAP else ""
    return ",".join(filter(None, [own, cap])) or None


needs_told_settings = pytest.mark.skipif(not TELLS_SETTINGS, reason="PyTorch tells its settings from 2.12 on")
