"""The record of a call in a worker, which the folds of calls and of rounds share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.trace import Event
from flower_gpu.watch.fields import mappings, number, text, whole_number

#: Phases of a call. The first is the wait for a lease, before there is a worker.
WAITING, STARTING, RUNNING, EXITING, DONE = "waiting", "starting", "running", "exiting", "done"


@dataclass
class WorkerSpan:
    """A call in a worker. A time is None if its event did not happen or is missing from the trace."""

    call: str
    client: str
    task: str
    round: int | None
    pid: int
    start_method: str
    lease: str  # id of the GPU lease, or of the lease on cores for a CPU call; empty without a lease
    started_at: float
    process: int = 0  # number of the process from 1; a reused worker process runs several calls
    task_at: float | None = None
    result_at: float | None = None
    finished_at: float | None = None
    seconds: float | None = None  # duration since the call was requested, reported at its end
    outcome: str = ""  # empty while the call runs
    error: str = ""
    traceback: str = ""
    peak_bytes: dict[str, int] = field(default_factory=dict)  # highest measured GPU memory, by UUID
    progress: tuple[str, int, int | None] = ("", 0, None)  # description, finished items, total items
    host: str = ""  # host in a Ray cluster; empty for the machine of the run itself
    # Options of this client only, such as ``slow-down``
    client_overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """Phase of the call: ``"starting"``, ``"running"``, ``"exiting"`` or ``"done"``."""
        if self.finished_at is not None:
            return DONE
        if self.result_at is not None:
            return EXITING
        return STARTING if self.task_at is None else RUNNING

    def finish(self, time: float, event: Event) -> None:
        """Set the outcome and the measured figures from the event at the end of the call."""
        self.finished_at, self.seconds = time, number(event.get("seconds"))
        self.outcome, self.error = text(event.get("outcome")), text(event.get("error"))
        self.traceback = text(event.get("traceback"))
        self.task_at = number(event.get("task_at")) or self.task_at
        self.result_at = number(event.get("result_at")) or self.result_at
        for gpu in mappings(event.get("gpus")):
            if (nbytes := whole_number(gpu.get("peak_bytes"))) is not None:
                self.peak_bytes[text(gpu.get("uuid"))] = nbytes
