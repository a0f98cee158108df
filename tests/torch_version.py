"""Capabilities of the installed PyTorch, derived from its version without importing it."""

from __future__ import annotations

import pytest
from packaging.version import Version

from flower_gpu.frameworks import pytorch, pytorch_memory

VERSION = Version(pytorch.installed_version() or "0")

#: True if PyTorch reads a memory cap from its settings, and True if it can report these settings.
TAKES_CAP = pytorch_memory.knows_fraction(str(VERSION))
TELLS_SETTINGS = Version("2.12") <= VERSION


def with_cap(fraction: str, own: str = "") -> str | None:
    """Return PYTORCH_ALLOC_CONF in a worker with this cap, or None if it is not set there."""
    cap = f"per_process_memory_fraction:{fraction}" if TAKES_CAP else ""
    return ",".join(filter(None, [own, cap])) or None


needs_told_settings = pytest.mark.skipif(not TELLS_SETTINGS, reason="PyTorch tells its settings from 2.12 on")
