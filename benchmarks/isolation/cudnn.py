"""cuDNN's libraries, loaded in each worker, or once in the fork server. No GPU is needed."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.processes import Member, members, new_state_folder

#: What loads them. The fork server does so when a call names a GPU: one goes before the measured ones.
_WAYS = {"each worker": False, "fork server": True}
_TIMEOUT_S = 300.0


def measure(runs: int) -> list[dict[str, Any]]:
    """Return one row for each way: of workers that load them, and of workers that do not need them."""
    loading: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    others: dict[str, list[float]] = {way: [] for way in _WAYS}
    with members(partial(_start, way) for way in _WAYS) as clients:
        for client in clients:
            client.ask(_TIMEOUT_S, names_gpu=_WAYS[client.name], loads=False)
        for number in range(runs):
            for client in clients[:: 1 if number % 2 else -1]:
                loading[client.name].append(client.ask(_TIMEOUT_S, names_gpu=False, loads=True))
                others[client.name].append(client.ask(_TIMEOUT_S, names_gpu=False, loads=False)["seconds"])
    rows = [_row(way, loading[way], others[way]) for way in _WAYS]
    _show(rows)
    return rows


def _start(way: str) -> Member:
    new_state_folder()
    return Member(way, "isolation.cudnn_client")


def _row(way: str, loading: list[dict[str, Any]], others: list[float]) -> dict[str, Any]:
    seconds = [reply["load_s"] for reply in loading]
    return {
        "way": way,
        "runs": len(loading),
        "libraries": loading[0]["libraries"],
        "load_median_s": round(median(seconds), 5),
        "load_min_s": round(min(seconds), 5),
        "load_max_s": round(max(seconds), 5),
        "own_mb": round(median(reply["own_mb"] for reply in loading), 1),
        "pss_mb": round(median(reply["pss_mb"] for reply in loading), 1),
        "call_that_loads_s": round(median(reply["seconds"] for reply in loading), 5),
        "call_that_does_not_s": round(median(others), 5),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table.show(
        f"{rows[0]['libraries']} libraries of cuDNN, loaded by",
        ("", "loading", "own MB", "PSS MB", "a call that loads them", "one that does not"),
        [
            (
                row["way"],
                table.seconds(row["load_median_s"]),
                row["own_mb"],
                row["pss_mb"],
                table.seconds(row["call_that_loads_s"]),
                table.seconds(row["call_that_does_not_s"]),
            )
            for row in rows
        ],
    )
