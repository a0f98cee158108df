"""A check whether an app depends on the state that earlier clients left in a worker.

The check is a run of its own. A used worker handles each message, and then a new worker handles it again. The
reply of the new worker counts. If the results differ, a second new worker shows which values change each time
anyway. Such values say nothing about used workers.
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

#: Note at the start of such a run.
NOTE: Final = (
    "this run is a check: messages are handled in used workers and again in new ones, to compare the "
    "results. The app writes its own files more than once"
)
_MOST_NAMES: Final = 3
_ARRAY: Final = "array "

#: Differences between two results by name, relative to the largest value. Infinity if no size can be given.
Differences = dict[str, float]


@dataclass
class Handled:
    """The result of a message: the reply or the error, and the client's context.

    ``call_s``: seconds of the call in its worker, or None if they are not representative.
    """

    context: Context
    reply: Message | None = None
    error: BaseException | None = None
    call_s: float | None = None


class Verifier:
    """Collects comparisons. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compared = 0
        self._clients: set[str] = set()
        self._different: set[str] = set()
        self._noisy: set[str] = set()
        self._largest = 0.0

    def compared(self, kind: str, client: str, used: Differences, noise: Differences) -> None:
        """Record the comparison of a message, and log the first difference of its client.

        ``kind``: type of the message.
        ``client``: name of the client.
        ``used``: differences between a new worker and a used one.
        ``noise``: differences between two new workers.
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
    """Return the facts of :meth:`Verifier.facts` as a sentence."""
    sentence = f"{facts['compared']} messages of {facts['compared_clients']} clients compared"
    if facts["noisy_clients"]:
        clients = _listed(facts["noisy_clients"])
        sentence += f"; new workers give different results for the same message of clients {clients}"
    if facts["different_clients"]:
        clients = _listed(facts["different_clients"])
        return f"{sentence}; used workers give other results than new ones for clients {clients}"
    return sentence if facts["noisy_clients"] else f"{sentence}; the same"


def differences(one: Handled, other: Handled) -> Differences:
    """Return the differences between two results of a message, in reply and state. Every bit counts."""
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
    """Return the difference of two values of records, relative to the largest; 0 if all bits are equal."""
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
    # The result is infinity for NaN, and for zeros with another sign: their bits differ, but not their size.
    return relative if relative > 0 else inf


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
