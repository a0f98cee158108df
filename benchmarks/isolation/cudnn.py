"""Part ``cudnn``: cuDNN's libraries loaded in each worker, or once in the fork server. Needs no GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.driver import Rows, medians
from benchmarks.shared.processes import Member, members, new_state_folder

#: Whether a call with a GPU precedes the measured calls. It makes the fork server load the libraries.
_WAYS = {"each worker": False, "fork server": True}
_TIMEOUT_S = 300.0


def measure(runs: int) -> Rows:
    """Return one row per way, with calls that load the libraries and calls that do not."""
    replies: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    with members(partial(_start, way) for way in _WAYS) as clients:
        for client in clients:
            client.ask(_TIMEOUT_S, has_gpu=_WAYS[client.name], loads=False)
        for number in range(runs):
            for client in clients[:: 1 if number % 2 else -1]:
                loading = client.ask(_TIMEOUT_S, has_gpu=False, loads=True)
                other = client.ask(_TIMEOUT_S, has_gpu=False, loads=False)
                replies[client.name].append({**loading, "call_without_loading_s": other["call_s"]})
    rows = [{"way": way, "runs": runs, **medians(found, 5)} for way, found in replies.items()]
    table.show("cuDNN's libraries, loaded by", rows)
    return rows


def _start(way: str) -> Member:
    new_state_folder()
    return Member(way, "isolation.cudnn_client")
