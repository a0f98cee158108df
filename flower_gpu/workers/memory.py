"""Main memory that a worker takes, beyond what it has in common with the process that it is a fork of."""

from __future__ import annotations

import os
import resource

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return how much memory this process has now; 0 where that is not known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError):
        return 0


def peak_bytes() -> int:
    """Return how much memory this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def taken_since(base_bytes: int) -> int:
    """Return how much more than ``base_bytes`` this process has had at most."""
    return max(0, peak_bytes() - base_bytes)
