"""What a trace tells of: GPUs, leases, workers, rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """One request for GPUs, and the lease that came of it.

    Parameters
    ----------
    call, client, task, round
        Whose it is: of the first call, where a worker runs several.
    requested_at, granted_at, released_at : float or None
        When; None where that did not happen, or the trace is cut.
    refused_at : float or None
        When the wait ended without a lease.
    id : str
        The lease's; empty before it is granted.
    memory_bytes : dict of str to int
        What it has of each GPU, by UUID.
    """

    call: str
    client: str
    task: str
    round: int | None
    requested_at: float | None
    caller_pid: int | None = None
    asked: str = ""
    granted_at: float | None = None
    refused_at: float | None = None
    released_at: float | None = None
    id: str = ""
    memory_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the line, as far as the trace tells."""
        return self.granted_at is None and self.refused_at is None and self.released_at is None


@dataclass
class WorkerSpan:
    """One call in one worker.

    Parameters
    ----------
    call, client, task, round, pid, start_method
        As in the trace.
    lease : str
        Id of the lease it has; empty on the CPU.
    started_at, task_at, cuda_at, result_at, finished_at : float or None
        When; None where it did not come to that, or the trace is cut.
    outcome, error : str
        How it ended; empty while it runs.
    peak_bytes, cap_bytes : dict of str to int
        Most memory it was seen to use, and the cap of its allocator, by UUID.
    progress : tuple of (str, int, int or None)
        What it said last: description, items done, items in all.
    """

    call: str
    client: str
    task: str
    round: int | None
    pid: int
    start_method: str
    lease: str
    started_at: float
    task_at: float | None = None
    cuda_at: float | None = None
    result_at: float | None = None
    finished_at: float | None = None
    outcome: str = ""
    error: str = ""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    cap_bytes: dict[str, int] = field(default_factory=dict)
    progress: tuple[str, int, int | None] = ("", 0, None)

    @property
    def phase(self) -> str:
        """What it does now: ``"starting"``, ``"running"``, ``"exiting"`` or ``"done"``."""
        if self.finished_at is not None:
            return DONE
        if self.result_at is not None:
            return EXITING
        # A zygote's worker tells when its task began only at its end; it takes milliseconds.
        return RUNNING if self.task_at is not None or self.start_method == "zygote" else STARTING


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
    metrics: dict[str, float]
    seconds: float | None = None


@dataclass
class OpenRound:
    """Messages of one kind that are under way."""

    round: int | None
    task: str
    messages: int | None
    started_at: float
    workers_finished: int = 0
    replies: int = 0  # told by a launched run only

    @property
    def finished(self) -> int:
        """How many of the messages have been handled."""
        return max(self.workers_finished, self.replies)
