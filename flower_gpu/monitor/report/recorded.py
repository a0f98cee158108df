"""A run's whole trace, with what only a report needs of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flower_gpu.monitor.history import History
from flower_gpu.monitor.spans import GPUInfo


@dataclass(frozen=True)
class SentMessages:
    """Messages of one kind in one round of a simulation: how many, and how many got no reply."""

    round: int | None
    task: str
    messages: int
    failed: int
    seconds: float | None


class RunHistory(History):
    """A run that is read once, from the first line to the last.

    Attributes
    ----------
    first_at : float or None
        When the first event was written.
    version : str
        Of flower-gpu, that ran it.
    pauses : list of (float, float)
        From when to when it did not run: an earlier run that this one goes on with has ended before.
    messages : dict
        What a simulation has sent, by round and kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_at: float | None = None
        self.version = ""
        self.pauses: list[tuple[float, float]] = []
        self.messages: dict[tuple[int | None, str], SentMessages] = {}
        self._before: float | None = None  # the time of the last event but this one

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in events, oldest first."""
        super().feed(self._noted(events))

    def over_at(self, since: float, end: float) -> float:
        """Return when at the latest something was over that began at a time: runs end, and processes die."""
        return min((begin for begin, _ in self.pauses if begin >= since), default=end)

    def gpus_of_run(self) -> list[GPUInfo]:
        """Return the GPUs that the run could use, by their numbers. Samples tell of all that the host has."""
        leased = {uuid for lease in self.leases for uuid in lease.memory_bytes}
        told = [gpu for gpu in self.gpus.values() if gpu.index >= 0 or gpu.uuid in leased]
        return sorted(told or self.gpus.values(), key=lambda gpu: (gpu.index, gpu.uuid))

    def _noted(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for event in events:
            yield event
            if self.first_at is None:
                self.first_at = self.last_at
            self._before = self.last_at

    def _on_run_started(self, time: float, event: Mapping[str, Any]) -> None:
        # Of two hosts that share a folder, each says that the run begins: then nothing has ended.
        goes_on = self.finished_at is not None or event.get("kind") == "simulate"
        if self.started_at is not None and goes_on:
            before = self.finished_at if self.finished_at is not None else self._before
            if before is not None and before < time:
                self.pauses.append((before, time))
        version = event.get("version")
        self.version = version if isinstance(version, str) else ""
        super()._on_run_started(time, event)

    def _on_round_finished(self, time: float, event: Mapping[str, Any]) -> None:
        super()._on_round_finished(time, event)
        number, task, seconds = event.get("round"), event.get("task"), event.get("seconds")
        messages, failed = event.get("messages"), event.get("failed")
        if not isinstance(task, str) or type(messages) is not int or type(failed) is not int:
            return
        round_ = number if type(number) is int else None
        took = seconds if isinstance(seconds, float) and math.isfinite(seconds) else None
        self.messages[round_, task] = SentMessages(round_, task, messages, failed, took)
