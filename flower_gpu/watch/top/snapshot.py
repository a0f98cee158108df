"""What is shown at one moment, as plain data; ``--json`` prints these fields under these names.

Sizes are bytes. None, or an empty text, stands for what driver, ledger or trace does not tell.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GPURow:
    """A GPU."""

    index: int
    uuid: str
    name: str
    mig_parent: str | None
    problem: str | None
    total_bytes: int | None
    used_bytes: int | None
    utilization_percent: int | None
    temperature_c: int | None
    capacity_bytes: int | None  # what leases can have of it now, those that are held included
    own_leased_bytes: int = 0  # leased to this account
    own_used_bytes: int = 0  # of that, as far as the workers tell
    other_leased_bytes: int = 0
    other_used_bytes: int = 0
    programs_bytes: int | None = None  # used without a lease


@dataclass(frozen=True)
class RunRow:
    """A run of this account."""

    run: str  # its app, with the process where several runs have the same name
    kind: str
    folder: str
    pid: int | None
    seconds: float | None  # since it began
    round: int | None  # the round that is under way, or was last
    num_rounds: int | None
    task: str  # of the messages under way
    messages_done: int | None
    messages: int | None
    calls_done: dict[str, int]  # of this round, by task
    metrics: dict[str, float]  # of the last evaluation
    metrics_round: int | None
    metrics_task: str
    outcome: str  # "completed", "failed", "interrupted", or "gone" where it was killed
    read_part: float  # of its trace: less than 1 only in the first seconds with a long one


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """A worker, or a lease of which no more is known; then the run, client, task and round are empty."""

    run: str = ""
    client: str = ""
    task: str = ""
    round: int | None = None
    label: str = ""  # what a lease of no run is for; empty for another account's
    user: str
    pid: int | None  # None before the worker has started; of a lease of no run, the process that has it
    gpus: tuple[int, ...]  # numbers; none on the CPU
    lease: str  # its ticket; empty on the CPU
    lease_bytes: int | None
    used_bytes: int | None
    peak_bytes: int | None
    seconds: float  # since it began
    phase: str = "held"  # or "starting", "running", "exiting", "idle": kept for the next message
    progress: str = ""
    progress_done: int | None = None
    progress_total: int | None = None


@dataclass(frozen=True)
class WaitingRow:
    """A request in the ledger's line."""

    lease: str  # its ticket
    run: str
    label: str
    user: str
    pid: int
    asked_bytes: int | None  # of a GPU: memory, or a part of it, or all of it
    asked_share: float | None
    asked_alone: bool
    count: int  # of GPUs
    gpus: tuple[int, ...]  # numbers of those that it may be on
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """All that is shown."""

    time: float
    host: str
    account: str
    gpu_problem: str | None  # why there is no GPU
    ledger_problem: str | None  # why nothing, or not all, is known of leases
    gpus: tuple[GPURow, ...]
    runs: tuple[RunRow, ...]
    workers: tuple[WorkerRow, ...]
    waiting: tuple[WaitingRow, ...]  # in the order of the line

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)
