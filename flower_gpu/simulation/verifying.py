"""Checks in a run of its own whether an app depends on the state of earlier clients in a worker.

A used worker handles a message, and then a new one does, whose reply counts. Where the two differ, a second
new worker tells what the app gives other values of each time: that says nothing about used workers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from logging import WARNING
from math import inf
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.logger import log

#: What is said when such a run begins.
NOTE: Final = (
    "this run is a check: messages are handled in used workers and again in new ones, to compare the "
    "results. The app writes its own files more than once"
)
_MOST_NAMES: Final = 3
_ARRAY: Final = "array "

#: What differs between two results, and how much relative to the largest value; infinity without a size.
Differences = dict[str, float]


@dataclass
class Handled:
    """What came of a message: the reply, or why there is none; the client's context.

    ``call_s``: what the call took in its worker, if that is to be learned.
    """

    context: Context
    reply: Message | None = None
    error: BaseException | None = None
    call_s: float | None = None


class Verifier:
    """Collects comparisons. Methods may be called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compared = 0
        self._clients: set[str] = set()
        self._different: set[str] = set()
        self._noisy: set[str] = set()
        self._largest = 0.0

    def compared(self, kind: str, client: str, used: Differences, noise: Differences) -> None:
        """Take note of a message, and say what was different.

        ``kind``: the message's type.
        ``client``: whose it is.
        ``used``: what was different between a new worker and a used one.
        ``noise``: the same between two new ones.
        """
        different = {name: size for name, size in used.items() if name not in noise}
        with self._lock:
            is_first = bool(different) and client not in self._different
            self._compared += 1
            self._clients.add(client)
            if different:
                self._different.add(client)
                self._largest = max(self._largest, *different.values())
            if any(name.startswith(_ARRAY) for name in noise):
                self._noisy.add(client)
        if is_first:
            log(
                WARNING,
                "Client %s, %s: a used worker gave another %s than a new one (by %.3g of the largest value). "
                "The app keeps something from one call to the next; --calls-per-worker 1 gives each message "
                "a process of its own",
                *(client, kind, _listed(list(different)), max(different.values())),
            )

    def facts(self) -> dict[str, Any]:
        """Return the findings for the summary."""
        return {
            "compared": self._compared,
            "compared_clients": len(self._clients),
            "different_clients": sorted(self._different),
            "noisy_clients": sorted(self._noisy),
            "largest_relative_difference": self._largest,
        }


def text(facts: dict[str, Any]) -> str:
    """Say in one sentence what :meth:`Verifier.facts` has."""
    found = f"{facts['compared']} messages of {facts['compared_clients']} clients compared"
    if facts["noisy_clients"]:
        named = _listed(facts["noisy_clients"])
        found += f"; new workers give different results for the same message of clients {named}"
    if facts["different_clients"]:
        named = _listed(facts["different_clients"])
        return f"{found}; used workers give other results than new ones for clients {named}"
    return found if facts["noisy_clients"] else f"{found}; the same"


def differences(one: Handled, other: Handled) -> Differences:
    """Return the differences between two results of one message, bit for bit: in reply and state."""
    if one.error is not None or other.error is not None:
        error = one.error or other.error
        return {} if type(one.error) is type(other.error) else {f"result, {type(error).__name__}": inf}
    assert one.reply is not None and other.reply is not None
    if one.reply.has_content() != other.reply.has_content():
        return {"reply": inf}
    found = _of_records(one.context.state, other.context.state, "state ")
    if one.reply.has_content():
        found |= _of_records(one.reply.content, other.reply.content, "metric ")
    return found


def _of_records(one: RecordDict, other: RecordDict, kind: str) -> Differences:
    found: Differences = {}
    for name in dict.fromkeys([*one, *other]):
        a: Any = one.get(name, {})
        b: Any = other.get(name, {})
        for key in dict.fromkeys([*a, *b]):
            if size := difference(a.get(key), b.get(key)):
                is_array = isinstance(a, ArrayRecord) and kind != "state "
                found[f"{_ARRAY if is_array else kind}{name}.{key}"] = size
    return found


def difference(one: Any, other: Any) -> float:
    """Return how much two values of records differ, relative to the largest; 0: not in a single bit."""
    if type(one) is not type(other):
        return inf
    a, b = (each.numpy() if isinstance(each, Array) else np.asarray(each) for each in (one, other))
    if a.shape != b.shape or a.dtype != b.dtype:
        return inf
    if a.tobytes() == b.tobytes():
        return 0.0
    if a.dtype.kind not in "biuf":
        return inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    scale = max(*(float(np.max(np.abs(each), initial=0.0)) for each in (a, b)), np.finfo(np.float64).tiny)
    relative = float(np.max(np.abs(a - b), initial=0.0)) / scale
    # Also of NaN, and of zeros with another sign, which are as large.
    return relative if relative > 0 else inf


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
