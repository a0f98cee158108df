"""Ranks: a call on several GPUs may run its function in one worker for each. The room ``ranks`` starts them.

The worker of such a call learns from variables how many ranks to start if it has no GPU, and when they must
end. Events of ranks about memory go on to the caller, which combines them.
"""

from __future__ import annotations

import os
import time
from typing import Final

from flower_gpu.calls.gpu_use import THIS_WORKER
from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.leases.lease import VARIABLE, Lease
from flower_gpu.options import CALL, DEADLINE_VARIABLE, RANKS_VARIABLE
from flower_gpu.workers import own_process

#: Variables of a rank, which starts no further ranks.
OF_RANK: Final = {RANKS_VARIABLE: "1"}
# Ranks are ended before the time limit of their call, so that they can report where they were: this many
# seconds, or this fraction of the remaining time if it is less.
_MARGIN_S: Final = 2.0
_MARGIN: Final = 0.1


class RankGrant(Grant):
    """The right of a worker to start one rank for each GPU that its call requests."""

    def environment(self, terms: Terms) -> dict[str, str]:
        """Pass the number of ranks to the worker, with the settings for their start."""
        count, worker = terms.settings.gpu.request.count, terms.settings.worker
        if count == 1 or not terms.method.is_own_process:
            return {}
        env = {RANKS_VARIABLE: str(count)}
        if worker.start_method != "auto":
            env[CALL["start_method"].variable] = worker.start_method
        if worker.timeout_s is not None:
            env[DEADLINE_VARIABLE] = str(time.monotonic() + worker.timeout_s)
        return env

    def in_worker(self, lease: Lease | None) -> None:
        """Forget the ranks of an earlier call."""
        THIS_WORKER.has_ranks = False


def _has_worker() -> bool:
    return own_process.belongs_here(VARIABLE) and not own_process.is_inside()


def count() -> int:
    """Return the number of ranks for a distributed function in this process.

    There is one for each GPU of the lease. On the CPU, there is one for each requested GPU, so that the
    result is the same. Outside of workers, and in a call that runs in its caller's process, the number is 1.
    """
    if not _has_worker():
        return 1
    lease = Lease.from_environment(os.environ)
    return len(lease.shares) if lease is not None else int(os.environ.get(RANKS_VARIABLE) or 1)


def is_asked_for_one() -> bool:
    """Return True if this is the worker of a call that requests one GPU or a share of one."""
    return _has_worker() and RANKS_VARIABLE not in os.environ


def remaining_s() -> float | None:
    """Return the time limit of ranks, a little less than the remaining time of the call, or None."""
    text = os.environ.get(DEADLINE_VARIABLE)
    if not text:
        return None
    remaining_s = float(text) - time.monotonic()
    return max(0.001, remaining_s - min(_MARGIN_S, _MARGIN * remaining_s))
