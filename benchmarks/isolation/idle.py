"""Memory of clients that wait between rounds, with all that serves them."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from benchmarks.isolation.ways import PLAIN
from benchmarks.shared import memory, table
from benchmarks.shared.processes import Member, descendants, end_descendants, members, new_state_folder

_OF_ONE = ("in-process", "article", "executor", "loky", "ours-spawn", "ours-forkserver")
_OF_MANY = ("in-process", "article", "ours-spawn", "ours-forkserver")
_QUICK = ("in-process", "ours-forkserver")
_TIMEOUT_S = 300.0


def measure(chosen: list[str], *, quick: bool) -> list[dict[str, Any]]:
    """Return one row per chosen way for one client after ten fits, and for 20 clients after two.

    Quickly: few ways, two clients, one fit.
    """
    end_descendants()  # what the parts before have left would be counted
    if quick:
        plan = [(PLAIN, 2, 0), *((way, 2, 1) for way in _QUICK if way in chosen)]
        rows = [_row(way, count, fits, 1.0, settle_s=0.1) for way, count, fits in plan]
    else:
        plan = [(PLAIN, 1, 0), *((way, 1, 10) for way in _OF_ONE if way in chosen)]
        plan += [(PLAIN, 20, 0), *((way, 20, 2) for way in _OF_MANY if way in chosen)]
        # The pause is for the helpers of workers: they end in it.
        rows = [_row(way, count, fits, 45.0, settle_s=2.0) for way, count, fits in plan]
    _show(rows)
    return rows


def _row(way: str, count: int, fits: int, size_mb: float, settle_s: float) -> dict[str, Any]:
    new_state_folder()
    with members([partial(Member, way, "isolation.idle_client", way, size_mb)] * count) as clients:
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


def _show(rows: list[dict[str, Any]]) -> None:
    """Print what waiting clients hold, for each number of clients."""
    for count in dict.fromkeys(row["clients"] for row in rows):
        chosen = [row for row in rows if row["clients"] == count]
        plain = next((row["client_mb"] for row in chosen if row["fits"] == 0), None)
        table.show(
            f"{count} waiting client{'s' * (count > 1)}, MB",
            (
                "way",
                "fits",
                "weights",
                "torch in client",
                "a client",
                "over plain",
                "processes",
                "all",
                "all per client",
            ),
            [
                (
                    row["way"],
                    row["fits"],
                    f"{row['weights_mb']:g}",
                    "yes" if row["torch_in_client"] else "no",
                    f"{row['client_mb']:.0f}",
                    "" if plain is None else f"{row['client_mb'] - plain:.0f}",
                    row["processes"],
                    f"{row['all_mb']:.0f}",
                    f"{row['all_per_client_mb']:.0f}",
                )
                for row in chosen
            ],
        )
