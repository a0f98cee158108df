"""Seconds per fit of a real client, for the usual ways and ours, call by call."""

from __future__ import annotations

import math
from functools import partial
from statistics import median
from typing import Any

from client_caller import WAYS
from processes import BenchmarkError, Member, members, new_state_folder

_QUICK = ("in-process", "article", "ours-forkserver")
_TIMEOUT_S = 300.0
_SAME_LOSS = 0.05  # threads change the last bits, and the epoch carries them on


def measure(chosen: list[str]) -> list[dict[str, Any]]:
    """Return one row per chosen way, with the seconds of ten fits of one client after each other."""
    return _measure([way for way in WAYS if way.partition(",")[0] in chosen], 10)


def measure_quickly(chosen: list[str]) -> list[dict[str, Any]]:
    """Do the same tiny: few ways, one fit."""
    return _measure([way for way in _QUICK if way in chosen], 1)


def _measure(ways: list[str], count: int) -> list[dict[str, Any]]:
    # Each client has a fork server of its own that nobody has used before, so that the first call is one.
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with members(partial(_start, way) for way in ways) as clients:
        for seed in range(count):
            losses = {}
            for client in clients:
                reply = client.ask(_TIMEOUT_S, seed=seed)
                seconds[client.name].append(round(reply["seconds"], 4))
                losses[client.name] = _checked_loss(client, reply)
            _compare(losses)
    return [_row(way, seconds[way]) for way in ways]


def _start(way: str) -> Member:
    new_state_folder()
    return Member(way, "client_caller.py", way)


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
