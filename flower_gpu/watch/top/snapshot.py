"""A snapshot of GPUs, runs, workers and leases as plain data, from the ledger, the driver and the histories.

``--json`` prints these fields under these names. Sizes are in bytes. A value that the driver, the ledger or
the trace does not report is None or an empty string.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.admission import CORES, MEMORY
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.options import RESERVE
from flower_gpu.printable import account_name
from flower_gpu.watch.fields import call_label
from flower_gpu.watch.folds.leases import LeaseSpan
from flower_gpu.watch.folds.worker_span import WorkerSpan
from flower_gpu.watch.followed_run import FollowedRun
from flower_gpu.watch.history import History
from flower_gpu.watch.host_look import Seen, look_at_host

_MUTEX_WAIT_S: Final = 1.0


@dataclass(frozen=True)
class GPURow:
    """A GPU with its memory by holder."""

    index: int
    uuid: str
    name: str
    mig_parent: str | None
    problem: str | None
    total_bytes: int | None
    used_bytes: int | None
    utilization_percent: int | None
    temperature_c: int | None
    capacity_bytes: int | None  # memory for leases now, including held leases
    own_leased_bytes: int = 0  # leased to this account
    own_used_bytes: int = 0  # used under these leases, as reported by the driver or the workers
    other_leased_bytes: int = 0  # leased to other accounts
    other_used_bytes: int = 0
    programs_bytes: int | None = None  # memory in use without a lease


@dataclass(frozen=True)
class HostRow:
    """The cores and the main memory of this host."""

    cores: float  # number of cores for leases
    cores_leased: float
    memory_capacity_bytes: int | None  # memory for leases now, including held leases
    memory_leased_bytes: int


@dataclass(frozen=True)
class RunRow:
    """A run of this account."""

    run: str  # name of the app, followed by the pid if several runs have the same name
    kind: str
    folder: str
    pid: int | None
    seconds: float | None  # duration so far, or in total if the run has finished
    round: int | None  # the current or last round
    num_rounds: int | None
    task: str  # task of the messages in flight
    messages_done: int | None
    messages: int | None
    calls_done: dict[str, int]  # number of finished calls in this round, by task
    metrics: dict[str, float]  # metrics of the last evaluation
    metrics_round: int | None
    outcome: str  # "completed", "failed", "interrupted", or "gone" if the run was killed
    read_part: float  # fraction of the trace that has been read: below 1 while a long trace is loading
    cores: float | None = None  # number of cores that a simulation has leased for all its messages together


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """A worker, or a lease without a known worker. For such a lease run, client, task and round are empty."""

    run: str = ""
    client: str = ""
    task: str = ""
    round: int | None = None
    label: str = ""  # purpose of a lease that belongs to no run; empty for other accounts
    user: str
    pid: int | None  # None before the worker has started; the holder's pid for a lease that belongs to no run
    gpus: tuple[int, ...]  # indices of the GPUs; empty on the CPU
    lease: str  # ticket of the lease; empty on the CPU
    lease_bytes: int | None
    used_bytes: int | None
    cores: float | None = None  # number of leased cores; None if cores are not counted
    host_memory_bytes: int | None = None  # leased main memory; None if it is not counted
    seconds: float  # age of the worker or of the lease
    phase: str = "held"  # or "starting", "running", "exiting", or "idle" between two messages
    progress: str = ""
    progress_done: int | None = None
    progress_total: int | None = None
    host: str = ""  # host of a Ray cluster, to which ``gpus`` refer; otherwise empty


@dataclass(frozen=True)
class WaitingRow:
    """A request that waits in the ledger's queue."""

    lease: str  # ticket of the request
    run: str
    label: str
    user: str
    pid: int
    # A request asks for memory of a GPU, for a fraction of it, or for all of it.
    asked_bytes: int | None
    asked_share: float | None
    asked_alone: bool
    count: int  # number of GPUs
    gpus: tuple[int, ...]  # indices of the GPUs that the request allows
    seconds: float  # time in the queue
    asked_cores: float | None = None
    asked_host_memory_bytes: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """The state of this host, its GPUs, runs, workers and waiting requests at one moment."""

    time: float  # Unix seconds
    host: str
    account: str
    gpu_problem: str | None  # reason why there is no GPU
    ledger_problem: str | None  # reason why the leases are unknown or incomplete
    gpus: tuple[GPURow, ...]
    runs: tuple[RunRow, ...]
    workers: tuple[WorkerRow, ...]
    waiting: tuple[WaitingRow, ...]  # in the order of the queue
    resources: HostRow | None = None  # cores and main memory; None if the ledger cannot be used

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot as a dict that ``json`` can write."""
        return asdict(self)


# Building a snapshot


def take_snapshot(runs: Sequence[FollowedRun], *, others: bool) -> Snapshot:
    """Return a snapshot of the GPUs and the ledger now, with the state of these runs as read so far.

    Each run gets a unique label. If ``others`` is True, the snapshot includes the leases that belong to no
    run in ``runs``.
    """
    runs = sorted(runs, key=lambda followed: followed.run.since if followed.run else 0.0)
    names = Counter(run.name for run in runs)
    for run in runs:
        run.label = run.name if names[run.name] == 1 else f"{run.name}:{run.pid}"
    seen = look_at_host(_MUTEX_WAIT_S, RESERVE.resolve(None, os.environ))
    workers = worker_rows(seen, runs, others=others)
    return Snapshot(
        time=seen.now,
        host=platform.node(),
        account=account_name(os.getuid()),
        gpu_problem=seen.inventory.problem,
        ledger_problem=seen.ledger_problem,
        gpus=gpu_rows(seen, {row.lease: row.pid for row in workers if row.run and row.lease and row.pid}),
        runs=tuple(replace(run_row(seen, run), cores=cores_of(seen, run)) for run in runs),
        workers=workers,
        waiting=waiting_rows(seen, runs),
        resources=host_row(seen),
    )


def gpu_rows(seen: Seen, worker_pids: Mapping[str, int]) -> tuple[GPURow, ...]:
    """Return the GPUs. A card in MIG mode is omitted if its MIG devices are listed.

    ``worker_pids``: pids of the workers by ticket, from the traces.
    """
    parents = {gpu.mig_parent for gpu in seen.inventory.gpus if gpu.mig_parent}
    # Prefer the GPU as it was when the ledger was read, because its memory then matches the leases.
    with_leases = {gpu.uuid: gpu for gpu in seen.state.gpus} if seen.state else {}
    return tuple(
        _gpu_row(seen, with_leases.get(gpu.uuid, gpu), worker_pids)
        for gpu in seen.inventory.gpus
        if gpu.uuid not in parents or not gpu.uuid
    )


def _gpu_row(seen: Seen, gpu: GPU, worker_pids: Mapping[str, int]) -> GPURow:
    leased, used = {True: 0, False: 0}, {True: 0, False: 0}
    listed = {process.pid: process.used_bytes for process in gpu.processes or ()}
    for entry in seen.holders:
        nbytes = sum(part.memory_bytes for part in entry.parts if part.uuid == gpu.uuid)
        is_own = entry.user == os.getuid()
        leased[is_own] += nbytes
        if nbytes:
            reported_pid, reported = seen.report(entry.id)
            used_bytes, pid = reported.get(gpu.uuid, 0), reported_pid or worker_pids.get(entry.id, 0)
            if entry.pid_namespace == pid_namespace() and pid:
                if listed.get(pid) is not None:
                    used_bytes = listed[pid] or 0
                elif not Path(f"/proc/{pid}").exists():
                    # The worker has ended. The memory of its last report is free or in use by another
                    # program.
                    used_bytes = 0
            # A worker can use more than its lease. The excess counts as memory of other programs.
            used[is_own] += min(used_bytes, nbytes)
    return GPURow(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        mig_parent=gpu.mig_parent,
        problem=gpu.problem,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.used_bytes,
        utilization_percent=gpu.utilization_percent,
        temperature_c=seen.temperatures.get(gpu.mig_parent or gpu.uuid),
        capacity_bytes=seen.capacity_bytes.get(gpu.uuid),
        own_leased_bytes=leased[True],
        own_used_bytes=used[True],
        other_leased_bytes=leased[False],
        other_used_bytes=used[False],
        programs_bytes=None if gpu.used_bytes is None else max(0, gpu.used_bytes - sum(used.values())),
    )


def host_row(seen: Seen) -> HostRow | None:
    """Return the cores and the main memory of this host, or None if the ledger cannot be used."""
    if seen.state is None:
        return None
    return HostRow(
        cores=seen.capacity_bytes[CORES] / 1000,
        cores_leased=seen.state.leased_bytes(CORES) / 1000,
        memory_capacity_bytes=seen.capacity_bytes.get(MEMORY),
        memory_leased_bytes=seen.state.leased_bytes(MEMORY),
    )


def run_row(seen: Seen, followed: FollowedRun) -> RunRow:
    """Return the row of a run, from its history."""
    history, run, open_round = followed.history, followed.run, followed.history.rounds.open_round
    began = run.since if run else history.run.started_at
    until = seen.now if history.run.finished_at is None else history.run.finished_at
    evaluations = [evaluation for evaluation in history.rounds.numbered_parts if evaluation.metrics]
    # Show metrics of training only if no other task has reported metrics.
    last = next(
        (evaluation for evaluation in reversed(evaluations) if evaluation.task != "train"),
        evaluations[-1] if evaluations else None,
    )
    return RunRow(
        run=followed.label,
        kind=run.kind if run else history.run.kind,
        folder=str(followed.folder),
        pid=followed.pid,
        seconds=None if began is None else max(0.0, until - began),
        round=history.calls.current_round,
        num_rounds=history.rounds.num_rounds,
        task=open_round.task if open_round else "",
        messages_done=open_round.finished if open_round else None,
        messages=open_round.messages if open_round else None,
        calls_done=history.calls.done_in_round,
        metrics=dict(last.metrics) if last else {},
        metrics_round=last.round if last else None,
        outcome=followed.outcome(),
        read_part=followed.read_part,
    )


def worker_rows(seen: Seen, runs: Sequence[FollowedRun], *, others: bool) -> tuple[WorkerRow, ...]:
    """Return the workers of each run in turn. If ``others`` is True, all other leases follow."""
    holders = {entry.id: entry for entry in seen.holders}
    rows: list[WorkerRow] = []
    for followed in runs:
        history, workers, is_over = followed.history, followed.workers(), followed.is_over
        rows += [_worker_row(seen, followed, worker, holders) for worker in workers]
        # The empty id excludes requests, because a request has no id before it is granted.
        with_worker = {"", *(worker.lease for worker in workers)}
        rows += [
            _lease_row(seen, followed, span, holders.get(span.id))
            for span in history.leases.spans
            # This host's ledger does not hold the leases of other hosts.
            if span.id not in with_worker and (span.id in holders or (span.host and not is_over))
        ]
    if others:
        known = {row.lease for row in rows} | {
            entry.id for run in runs for entry in _message_leases(seen, run)
        }
        rest = [_entry_row(seen, entry) for entry in seen.holders if entry.id not in known]
        # Leases of this account come first: only they have a label.
        rows += sorted(rest, key=lambda row: not row.label)
    return tuple(rows)


def _worker_row(
    seen: Seen, followed: FollowedRun, worker: WorkerSpan, holders: Mapping[str, Entry]
) -> WorkerRow:
    """Return the row of a worker."""
    lease = holders.get(worker.lease) or followed.history.calls.lease_of(worker)
    desc, done, total = worker.progress
    has_progress = worker.phase == "running" and worker.progress != ("", 0, None)
    return WorkerRow(
        **_lease_fields(seen, worker.lease, lease, followed.history),
        host=worker.host,
        run=followed.label,
        client=worker.client,
        task=worker.task,
        round=worker.round,
        user=account_name(os.getuid()),
        pid=worker.pid,
        seconds=seen.age(worker.started_at),
        phase=worker.phase,
        progress=desc if has_progress else "",
        progress_done=done if has_progress else None,
        progress_total=total if has_progress else None,
    )


def _lease_row(seen: Seen, followed: FollowedRun, span: LeaseSpan, entry: Entry | None) -> WorkerRow:
    """Return the row of a lease before its worker starts, or while its worker waits for the next message."""
    since = entry.since if entry else seen.now if span.granted_at is None else span.granted_at
    known: dict[str, Any] = {"phase": "idle"}
    # After its first message the lease is no longer tied to a client, because the next message may be for
    # another client.
    if not span.is_used:
        known = {"client": span.client, "task": span.task, "round": span.round, "phase": "starting"}
    return WorkerRow(
        **_lease_fields(seen, span.id, entry or span, followed.history),
        **known,
        host=span.host,
        run=followed.label,
        user=account_name(os.getuid()),
        pid=seen.report(span.id)[0] or None,
        seconds=seen.age(since),
    )


def cores_of(seen: Seen, followed: FollowedRun) -> float | None:
    """Return the number of cores that a run has leased for all its messages, or None without such a lease."""
    cores = [entry.cores or 0.0 for entry in _message_leases(seen, followed)]
    return sum(cores) if cores else None


def _message_leases(seen: Seen, followed: FollowedRun) -> list[Entry]:
    """Return the leases on cores that a run's process holds itself, without the leases of its workers."""
    if not followed.is_of_this_host:
        return []
    with_worker = {span.id for span in followed.history.leases.spans}
    return [
        entry
        for entry in seen.holders
        if entry.pid == followed.pid
        and entry.user == os.getuid()
        and entry.pid_namespace == pid_namespace()
        and not entry.gpu_parts
        and entry.id not in with_worker
    ]


def _entry_row(seen: Seen, entry: Entry) -> WorkerRow:
    """Return the row of a lease from the ledger alone."""
    return WorkerRow(
        **_lease_fields(seen, entry.id, entry, None),
        label=entry.label(),
        user=account_name(entry.user),
        pid=entry.pid,
        seconds=seen.age(entry.since),
    )


def _lease_fields(
    seen: Seen, ticket: str, lease: Entry | LeaseSpan | None, history: History | None
) -> dict[str, Any]:
    """Return the fields of a row that describe its lease, from the ledger or the trace."""
    parts: Mapping[str, int] = {}
    numbers: tuple[int, ...] | None = None
    if isinstance(lease, Entry):
        parts = {part.uuid: part.memory_bytes for part in lease.gpu_parts}
    elif lease is not None:
        parts = lease.memory_bytes
        # Only the trace knows the indices of another host's GPUs.
        if history is not None and lease.host:
            numbers = tuple(sorted(history.hosts.gpus[uuid].index for uuid in parts))
    pid, used = seen.report(ticket)
    return {
        "gpus": seen.numbers(parts) if numbers is None else numbers,
        "lease": ticket,
        "lease_bytes": sum(parts.values()) if parts else None,
        "used_bytes": sum(used.values()) if pid and parts else None,
        "cores": lease.cores if lease else None,
        "host_memory_bytes": lease.host_memory_bytes if lease else None,
    }


def waiting_rows(seen: Seen, runs: Sequence[FollowedRun]) -> tuple[WaitingRow, ...]:
    """Return the waiting requests in the order of the ledger's queue."""
    labels_by_request = {
        (request.caller_pid, call_label(asdict(request))): followed.label
        for followed in runs
        for request in followed.history.leases.waiting
        if followed.is_of_this_host and request.host in ("", platform.node())
    }
    entries = seen.state.waiting if seen.state else ()
    return tuple(_waiting_row(seen, entry, labels_by_request) for entry in entries)


def _waiting_row(
    seen: Seen, entry: Entry, labels_by_request: Mapping[tuple[int | None, str], str]
) -> WaitingRow:
    first = entry.gpu_needs[0] if entry.gpu_needs else None
    label = entry.label()
    has_same_pids = entry.pid_namespace == pid_namespace()
    return WaitingRow(
        lease=entry.id,
        run=labels_by_request.get((entry.pid, label), "") if has_same_pids else "",
        label=label,
        user=account_name(entry.user),
        pid=entry.pid,
        asked_bytes=first.memory_bytes if first else None,
        asked_share=first.share if first else None,
        asked_alone=bool(first and first.alone),
        count=entry.count,
        gpus=seen.numbers(need.uuid for need in entry.gpu_needs),
        seconds=seen.age(entry.since),
        asked_cores=entry.cores,
        asked_host_memory_bytes=entry.host_memory_bytes,
    )
