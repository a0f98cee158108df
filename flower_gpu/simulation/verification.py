"""Whether a message gives the same in a worker that others have used as in a new one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common.logger import log

from flower_gpu.flower.records import records_in


@dataclass
class Verification:
    """Compares the replies to some messages with those of new workers."""

    checks: int  # how many messages are compared
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taken: int = 0
    _largest: float = 0.0
    _different: list[str] = field(default_factory=list)

    def verify(self, client: str, reply: Message, again: Callable[[], Message]) -> None:
        """Have a message handled again, if there were not enough yet, and compare the weights.

        Parameters
        ----------
        client : str
            Whose message it is.
        reply : Message
            What a used worker has answered.
        again : callable
            Has a new worker handle the message.
        """
        with self._lock:
            if self._taken >= self.checks:
                return
            self._taken += 1
        found = difference(reply, again())
        with self._lock:
            self._largest = max(self._largest, found)
            if found:
                self._different.append(client)
        if found:
            log(
                WARNING,
                "Client %s: a worker that had handled other messages gave other weights than a new one "
                "(largest difference %.3g of the largest weight). The app keeps something in its modules "
                "from one call to the next: use calls_per_worker=1, or find it",
                client,
                found,
            )

    def facts(self) -> dict[str, Any]:
        """Return what was found, for the summary."""
        return {
            "compared": self._taken,
            "different_clients": list(self._different),
            "largest_relative_difference": self._largest,
        }


def difference(one: Message, other: Message) -> float:
    """Return the largest difference between the arrays of two replies, relative to the largest value.

    Returns
    -------
    float
        0 if they are the same, bit for bit; infinity if there are other arrays.
    """
    largest = 0.0
    records = [records_in(message, ArrayRecord) for message in (one, other)]
    if records[0].keys() != records[1].keys():
        return float("inf")
    for name, arrays in records[0].items():
        others = records[1][name]
        if list(arrays) != list(others):
            return float("inf")
        for key, array in arrays.items():
            a, b = array.numpy(), others[key].numpy()
            if a.shape != b.shape or a.dtype != b.dtype:
                return float("inf")
            if a.tobytes() != b.tobytes():
                a, b = a.astype(np.float64), b.astype(np.float64)
                scale = max(float(np.max(np.abs(a), initial=0.0)), float(np.finfo(np.float64).tiny))
                found = float(np.max(np.abs(a - b), initial=0.0)) / scale
                largest = max(largest, found if found == found else float("inf"))
    return largest
