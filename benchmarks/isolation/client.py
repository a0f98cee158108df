"""Seconds per fit of a real client, for the usual ways and ours, call by call."""

from __future__ import annotations

import math
from functools import partial
from statistics import median
from typing import Any

from benchmarks.isolation.client_caller import WAYS
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError, Member, members, new_state_folder

_QUICK = ("in-process",)  # the imports of others take long, and their calls are those of the part calls
_TIMEOUT_S = 300.0
_SAME_LOSS = 0.05  # threads change the last bits, and the epoch carries them on


def measure(chosen: list[str], *, quick: bool) -> list[dict[str, Any]]:
    """Return one row per chosen way, with the seconds of ten fits of one client after each other.

    Quickly: few ways, one fit.
    """
    ways = [way for way in (_QUICK if quick else WAYS) if way.partition(",")[0] in chosen]
    # Each client has a fork server of its own that nobody has used before, so that the first call is one.
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with members(partial(_start, way) for way in ways) as clients:
        for seed in range(1 if quick else 10):
            losses = {}
            for client in clients:
                reply = client.ask(_TIMEOUT_S, seed=seed)
                seconds[client.name].append(round(reply["seconds"], 4))
                losses[client.name] = _checked_loss(client, reply)
            _compare(losses)
    rows = [_row(way, seconds[way]) for way in ways]
    _show(rows)
    return rows


def _start(way: str) -> Member:
    new_state_folder()
    return Member(way, "isolation.client_caller", way)


def _row(way: str, seconds: list[float]) -> dict[str, Any]:
    later = seconds[2:]
    return {"way": way, "seconds": seconds, "later_median_s": round(median(later), 4) if later else None}


def _checked_loss(client: Member, reply: dict[str, Any]) -> float:
    loss = float(reply["loss"])
    if not (math.isfinite(loss) and reply["changed"]):
        raise BenchmarkError(f"{client.name}: the fit did not train: loss {loss}")
    return loss


def _compare(losses: dict[str, float]) -> None:
    if max(losses.values()) - min(losses.values()) > _SAME_LOSS:
        raise BenchmarkError(f"the ways disagree about the training loss: {losses}")


def _show(rows: list[dict[str, Any]]) -> None:
    """Print the seconds of each fit, and the median from the third on."""
    reference = next((row["later_median_s"] for row in rows if row["way"] == "article"), None)
    count = len(rows[0]["seconds"]) if rows else 0
    table.show(
        "fit of a real client (torch, scikit-learn, flwr-datasets; a data set in a global), s per call",
        ("way", *map(str, range(1, count + 1)), "median from 3rd", "faster than article"),
        [
            (
                row["way"],
                *(f"{value:.2f}" for value in row["seconds"]),
                "" if row["later_median_s"] is None else table.seconds(row["later_median_s"]),
                "" if reference is None else table.times_faster(row["later_median_s"], reference),
            )
            for row in rows
        ],
    )
