"""Part ``client``: seconds per fit of a realistic client, in the usual ways and in ours."""

from __future__ import annotations

import math
from functools import partial
from statistics import median
from typing import Any

from benchmarks.isolation.client_caller import WAYS
from benchmarks.shared import table
from benchmarks.shared.driver import Rows
from benchmarks.shared.processes import BenchmarkError, Member, members, new_state_folder

#: The imports of the other ways take long, and part ``calls`` tests their calls.
_QUICK = ("in-process",)
_FITS = 10
_TIMEOUT_S = 300.0
#: Threads change the last bits of a sum, and an epoch amplifies them.
_MAX_LOSS_DIFFERENCE = 0.05


def measure(ways: list[str], *, is_quick: bool) -> Rows:
    """Return one row per way, with the seconds of ten successive fits of one client."""
    names = [name for name in (_QUICK if is_quick else WAYS) if name.partition(",")[0] in ways]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with members(partial(_start, name) for name in names) as clients:
        for seed in range(1 if is_quick else _FITS):
            losses = {}
            for client in clients:
                reply = client.ask(_TIMEOUT_S, seed=seed)
                seconds[client.name].append(round(reply["seconds"], 4))
                losses[client.name] = _checked_loss(client, reply)
            if max(losses.values()) - min(losses.values()) > _MAX_LOSS_DIFFERENCE:
                raise BenchmarkError(f"the training losses of the ways differ: {losses}")
    rows = [{"way": name, "seconds": values, **_later(values[2:])} for name, values in seconds.items()]
    table.show("fit of a realistic client, seconds of each call", rows)
    return rows


def _start(way: str) -> Member:
    # With a new fork server for each client, the first fit includes the server's imports.
    new_state_folder()
    return Member(way, "isolation.client_caller", way)


def _later(seconds: list[float]) -> dict[str, float | None]:
    return {"later_median_s": round(median(seconds), 4) if seconds else None}


def _checked_loss(client: Member, reply: dict[str, Any]) -> float:
    loss = float(reply["loss"])
    if not (math.isfinite(loss) and reply["changed"]):
        raise BenchmarkError(f"{client.name}: the fit did not train: loss {loss}")
    return loss
