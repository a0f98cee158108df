"""Kills of workers by the kernel because main memory ran out (the out-of-memory killer).

The kernel does not tell a parent why its child got SIGKILL, but it counts these kills for each control group.
If the count rises while a worker is killed, the kernel is assumed to have killed this worker. Several workers
may end at the same time in different threads, so each kill is claimed only once in this process.
"""

from __future__ import annotations

from flower_gpu import control_group
from flower_gpu.workers.own_process import OwnLock

_lock = OwnLock()
_claimed = 0  # kills up to this count are claimed


def count() -> int:
    """Return the number of kills so far, for :func:`claim`."""
    return control_group.oom_kills()


def claim(count_before: int) -> bool:
    """Claim a kill since ``count_before``, and return True. Return False if no kill is unclaimed."""
    global _claimed
    now = control_group.oom_kills()
    with _lock:
        first = max(count_before, _claimed)
        if now <= first:
            return False
        _claimed = first + 1
        return True
