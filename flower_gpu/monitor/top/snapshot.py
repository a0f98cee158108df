"""What is shown at one moment, as plain data; ``--json`` prints these fields under these names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GPURow:
    """A GPU. Figures are None where the driver, or the ledger, does not tell them.

    Parameters
    ----------
    index, uuid, name, mig_parent, problem
        See :class:`flower_gpu.gpu.inventory.GPU`.
    total_bytes, used_bytes : int or None
        Its memory.
    utilization_percent, temperature_c : int or None
        How busy, and how warm.
    capacity_bytes : int or None
        What leases can have of it now, those that are held included.
    own_leased_bytes, other_leased_bytes : int
        What is leased by this account and by others.
    own_used_bytes, other_used_bytes : int
        What of that is in use, as far as the workers tell.
    programs_bytes : int or None
        What is in use by nobody who has a lease.
    """

    index: int
    uuid: str
    name: str
    mig_parent: str | None
    problem: str | None
    total_bytes: int | None
    used_bytes: int | None
    utilization_percent: int | None
    temperature_c: int | None
    capacity_bytes: int | None
    own_leased_bytes: int = 0
    own_used_bytes: int = 0
    other_leased_bytes: int = 0
    other_used_bytes: int = 0
    programs_bytes: int | None = None


@dataclass(frozen=True)
class RunRow:
    """A run of this account.

    Parameters
    ----------
    run : str
        How the other rows name it: its app, with the process where several have the same name.
    kind, folder, pid
        What runs, where its trace is, which process has started it; empty or None where not told.
    seconds : float or None
        Since it began.
    round, num_rounds : int or None
        The round that is under way, or was last, of how many.
    task : str
        What the messages under way are, where the run tells.
    messages_done, messages : int or None
        How many of them are done, of how many.
    calls_done : dict of str to int
        Calls of this round that are done, by task.
    metrics, metrics_round, metrics_task
        Of the last evaluation; empty and None before there was one.
    outcome : str
        How it ended: ``"completed"``, ``"failed"``, ``"interrupted"``, or ``"gone"`` for one that was killed;
        empty while it goes on.
    read_part : float
        How much of its trace has been read: less than 1 only in the first seconds with a long one.
    """

    run: str
    kind: str
    folder: str
    pid: int | None
    seconds: float | None
    round: int | None
    num_rounds: int | None
    task: str
    messages_done: int | None
    messages: int | None
    calls_done: dict[str, int]
    metrics: dict[str, float]
    metrics_round: int | None
    metrics_task: str
    outcome: str
    read_part: float


@dataclass(frozen=True)
class WorkerRow:
    """A worker, or a lease of which no more is known.

    Parameters
    ----------
    run : str
        Its run; empty for a lease that belongs to none.
    client, task, round
        What it does; empty or None where that is not known.
    label : str
        What the lease is for; empty for another account's.
    user : str
        The account.
    pid : int or None
        The worker, or None before it has started; of a lease that belongs to no run, the process that has it.
    gpus : tuple of int
        Numbers of its GPUs; none on the CPU.
    lease : str
        Names its ticket; empty on the CPU.
    lease_bytes, used_bytes, peak_bytes : int or None
        What it may have, uses, and has been seen to use at most.
    seconds : float
        Since it began.
    phase : str
        ``"starting"``, ``"running"``, ``"exiting"``, ``"idle"`` (a worker that is kept for its next message),
        or ``"held"`` for a lease of which no more is known.
    progress : str
        What the task says that it does.
    progress_done, progress_total : int or None
        How far it is.
    """

    run: str
    client: str
    task: str
    round: int | None
    label: str
    user: str
    pid: int | None
    gpus: tuple[int, ...]
    lease: str
    lease_bytes: int | None
    used_bytes: int | None
    peak_bytes: int | None
    seconds: float
    phase: str
    progress: str = ""
    progress_done: int | None = None
    progress_total: int | None = None


@dataclass(frozen=True)
class WaitingRow:
    """A request in the ledger's line.

    Parameters
    ----------
    lease : str
        Names its ticket.
    run, label, user
        As of a worker.
    pid : int
        The process that waits.
    asked_bytes, asked_share, asked_alone
        How much of a GPU: memory, or a part of it, or one with nobody else on it.
    count : int
        How many GPUs.
    gpus : tuple of int
        Numbers of those that it may be on.
    seconds : float
        For how long it has waited.
    """

    lease: str
    run: str
    label: str
    user: str
    pid: int
    asked_bytes: int | None
    asked_share: float | None
    asked_alone: bool
    count: int
    gpus: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """All that is shown.

    Parameters
    ----------
    time : float
        When it was taken; Unix seconds.
    host : str
        Name of this machine.
    account : str
        Whose runs these are.
    gpu_problem : str or None
        Why there is no GPU.
    ledger_problem : str or None
        Why nothing, or not all, is known of leases.
    gpus, runs, workers, waiting
        The rows; those that wait in the order of the line.
    """

    time: float
    host: str
    account: str
    gpu_problem: str | None
    ledger_problem: str | None
    gpus: tuple[GPURow, ...]
    runs: tuple[RunRow, ...]
    workers: tuple[WorkerRow, ...]
    waiting: tuple[WaitingRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)
