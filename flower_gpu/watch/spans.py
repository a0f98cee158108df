"""What a trace tells of: GPUs, leases, workers, rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flower_gpu.workers import methods

WAITING, STARTING, RUNNING, EXITING, DONE = "waiting", "starting", "running", "exiting", "done"


@dataclass
class GPUInfo:
    """A GPU that a run could use. Sizes in bytes; None where not told."""

    uuid: str
    index: int = -1
    name: str = ""
    total_bytes: int | None = None
    capacity_bytes: int | None = None


@dataclass
class GPUSample:
    """A GPU at one moment. Times are Unix seconds; figures are None where the driver does not tell."""

    time: float
    used_bytes: int | None
    utilization_percent: float | None
    temperature_c: float | None


@dataclass
class LeaseSpan:
    """One request for GPUs, and the lease that came of it: of the first call, where a worker runs several.

    Times are None where that did not happen, or the trace is cut; ``memory_bytes`` is by UUID.
    """

    call: str
    client: str
    task: str
    round: int | None
    requested_at: float | None
    caller_pid: int | None = None
    asked: str = ""
    granted_at: float | None = None
    refused_at: float | None = None  # the wait ended without a lease
    released_at: float | None = None
    id: str = ""
    waited_s: float = 0.0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    is_used: bool = False  # a worker has done a call with it


@dataclass
class WorkerSpan:
    """One call in one worker. Times are None where it did not come to that, or the trace is cut."""

    call: str
    client: str
    task: str
    round: int | None
    pid: int
    start_method: str
    lease: str  # its id; empty on the CPU
    started_at: float
    task_at: float | None = None
    cuda_at: float | None = None
    result_at: float | None = None
    finished_at: float | None = None
    seconds: float | None = None  # since it was asked for, as told at its end
    outcome: str = ""  # empty while it runs
    error: str = ""
    peak_bytes: dict[str, int] = field(default_factory=dict)  # by UUID: the most it was seen to use
    cap_bytes: dict[str, int] = field(default_factory=dict)
    progress: tuple[str, int, int | None] = ("", 0, None)  # description, items done, items in all

    @property
    def phase(self) -> str:
        """What it does now: ``"starting"``, ``"running"``, ``"exiting"`` or ``"done"``."""
        if self.finished_at is not None:
            return DONE
        if self.result_at is not None:
            return EXITING
        is_running = self.task_at is not None or not methods.tells_start(self.start_method)
        return RUNNING if is_running else STARTING


@dataclass
class OutOfMemory:
    """A call that ran out of GPU memory, and what followed: ``"again"``, ``"on the CPU"``, ``"failed"``."""

    time: float
    client: str
    task: str
    uuid: str
    kind: str
    then: str


@dataclass
class Evaluation:
    """Metrics of a round: of a server-side evaluation, or as a strategy has aggregated clients' ones."""

    time: float
    round: int
    task: str
    metrics: dict[str, float]  # numbers only
    seconds: float | None = None
    told: dict[str, Any] = field(default_factory=dict)  # all metrics, as they are in the trace
    messages: int = 0
    failed: int = 0


@dataclass(frozen=True)
class SentMessages:
    """Messages of one kind in one round of a simulation: how many, and how many got no reply."""

    round: int | None
    task: str
    messages: int
    failed: int
    seconds: float | None


@dataclass
class OpenRound:
    """Messages of one kind that are under way."""

    round: int | None
    task: str
    messages: int | None
    started_at: float
    workers_finished: int = 0
    replies: int = 0  # the trace of a simulated run does not tell them
    failed: int = 0

    @property
    def finished(self) -> int:
        """How many of the messages have been handled."""
        return max(self.workers_finished, self.replies)
