"""Forked processes that lease. Each of them exits in :func:`fork` and never returns to its caller."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from nvml_stub import allocate

from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases import tickets
from flower_gpu.leases.admission import GPUNeed
from flower_gpu.leases.lease import VARIABLE, Lease, Share
from flower_gpu.leases.ledger import Claimant
from flower_gpu.leases.tickets import Ticket

RESERVE_BYTES = 256 << 20


def fork(action: Callable[[], None]) -> int:
    """Run a function in a forked process, which exits with status 1 if the function raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def claimant(memory_bytes: int | None = None, share: float | None = None, count: int = 1) -> Claimant:
    def options(gpus: Sequence[GPU]) -> tuple[GPUNeed, ...]:
        return tuple(GPUNeed(gpu.uuid, memory_bytes, share) for gpu in gpus)

    return Claimant(options, count=count, label=f"benchmark {os.getpid()}")


def use(ticket: Ticket, fraction: float) -> None:
    """Use a fraction of the granted memory and report it, like a worker."""
    used = {granted.uuid: int(granted.memory_bytes * fraction) for granted in ticket.entry.parts}
    shares = tuple(Share(part.uuid, 0, "", 0, part.memory_bytes, 0) for part in ticket.entry.parts)
    os.environ[VARIABLE] = Lease(ticket.entry.id, shares, ticket=str(ticket.entry.path)).to_text()
    for uuid, nbytes in used.items():
        allocate(uuid, nbytes)
    tickets.report(used)


def stop_using(ticket: Ticket) -> None:
    """Free the memory, as the exit of a worker does before its lease is released."""
    for granted in ticket.entry.parts:
        allocate(granted.uuid, 0)


def wait_for(pids: Sequence[int], timeout_s: float) -> dict[int, int]:
    """Wait for the exit of all processes, up to a timeout; return their statuses."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(statuses) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in statuses:
                exited, status = os.waitpid(pid, os.WNOHANG)
                if exited:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return statuses
