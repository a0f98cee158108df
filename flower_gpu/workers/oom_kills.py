"""Tells whether the kernel has killed a worker because main memory ran out (the out-of-memory killer).

The kernel does not tell a parent why its child got SIGKILL. It counts such kills for each control group. So a
worker that was killed while the count rose is taken for one of them. Each kill is claimed once in this
process, however many workers end in the meantime.
"""

from __future__ import annotations

from flower_gpu import control_group
from flower_gpu.workers.own_process import OwnLock

_lock = OwnLock()
_claimed = 0  # kills up to this count had their workers


def count() -> int:
    """Return the number of kills so far, for :func:`claim`."""
    return control_group.oom_kills()


def claim(before: int) -> bool:
    """Return True if there was a kill since the count ``before`` that no other worker has claimed."""
    global _claimed
    now = control_group.oom_kills()
    with _lock:
        first = max(before, _claimed)
        if now <= first:
            return False
        _claimed = first + 1
        return True
