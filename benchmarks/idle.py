"""Memory of clients that wait between rounds, with all that serves them."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import memory
from processes import Member, descendants, end_descendants, members, new_state_folder
from ways import PLAIN

_OF_ONE = ("in-process", "article", "executor", "loky", "ours-spawn", "ours-forkserver")
_OF_MANY = ("in-process", "article", "ours-spawn", "ours-forkserver")
_QUICK = ("in-process", "ours-forkserver")
_TIMEOUT_S = 300.0


def measure(chosen: list[str], settle_s: float = 2.0) -> list[dict[str, Any]]:
    """Return one row per chosen way for one client after ten fits, and for 20 clients after two.

    Parameters
    ----------
    chosen : list of str
        Names in :data:`ways.WAYS`.
    settle_s : float
        Pause before memory is read, in which the helpers of workers end.
    """
    size_mb = 45.0
    plan = [(PLAIN, 1, 0), *((way, 1, 10) for way in _OF_ONE if way in chosen)]
    plan += [(PLAIN, 20, 0), *((way, 20, 2) for way in _OF_MANY if way in chosen)]
    return [_row(way, count, fits, size_mb, settle_s) for way, count, fits in plan]


def measure_quickly(chosen: list[str]) -> list[dict[str, Any]]:
    """Do the same tiny: few ways, two clients, one fit."""
    plan = [(PLAIN, 0), *((way, 1) for way in _QUICK if way in chosen)]
    return [_row(way, 2, fits, 1.0, settle_s=0.1) for way, fits in plan]


def _row(way: str, count: int, fits: int, size_mb: float, settle_s: float) -> dict[str, Any]:
    new_state_folder()
    with members([partial(Member, way, "idle_client.py", way, size_mb)] * count) as clients:
        replies = [client.ask(_TIMEOUT_S * max(1, fits), fits=fits) for client in clients]
        time.sleep(settle_s)
        pids = descendants(os.getpid())
        proportional_mb, hidden_mb = memory.proportional_mb(pids), memory.hidden_files_mb(pids)
        client_mb = max(
            memory.resident_mb(client.pid) + memory.hidden_files_mb([client.pid]) for client in clients
        )
    end_descendants()
    return {
        "way": way,
        "clients": count,
        "weights_mb": size_mb if fits else 0,
        "fits": fits,
        "torch_in_client": any(reply["torch"] for reply in replies),
        "processes": len(pids),
        "client_mb": round(client_mb, 1),
        "all_mb": round(proportional_mb + hidden_mb, 1),
        "all_per_client_mb": round((proportional_mb + hidden_mb) / count, 1),
    }
