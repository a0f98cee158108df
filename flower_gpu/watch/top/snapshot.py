"""The figures of one moment as plain data, from ledger, driver and histories.

``--json`` prints these fields under these names. Sizes are bytes. None, or an empty text, stands for what
driver, ledger or trace does not tell.
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
from flower_gpu.watch.followed_run import FollowedRun
from flower_gpu.watch.history import History
from flower_gpu.watch.host_look import Seen, look_at_host
from flower_gpu.watch.spans import LeaseSpan, WorkerSpan

_MUTEX_WAIT_S: Final = 1.0


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
class HostRow:
    """The cores and the main memory of this host."""

    cores: float  # that leases can have
    cores_leased: float
    memory_capacity_bytes: int | None  # what leases can have of it now, those that are held included
    memory_leased_bytes: int


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
    outcome: str  # "completed", "failed", "interrupted", or "gone" where it was killed
    read_part: float  # of its trace: less than 1 only in the first seconds with a long one
    cores: float | None = None  # that a simulation has leased for all its messages together


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
    cores: float | None = None  # that it has leased; None: they are not counted
    host_memory_bytes: int | None = None  # the same of main memory
    seconds: float  # since it began
    phase: str = "held"  # or "starting", "running", "exiting", "idle": kept for the next message
    progress: str = ""
    progress_done: int | None = None
    progress_total: int | None = None
    host: str = ""  # of a Ray cluster; then ``gpus`` are that host's


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
    asked_cores: float | None = None
    asked_host_memory_bytes: int | None = None


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
    resources: HostRow | None = None  # cores and main memory; None: the ledger cannot be used

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


# How it is put together


def take(runs: Sequence[FollowedRun], *, others: bool) -> Snapshot:
    """Look at the GPUs and the ledger, and return them with these runs as they were read last.

    Each run gets a label that no other has. With ``others`` leases that belong to none of them are shown.
    """
    runs = sorted(runs, key=lambda one: one.run.since if one.run else 0.0)
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
    """Return the GPUs. A card in MIG mode is left out where its MIG devices are there.

    ``worker_pids`` has the workers by ticket, as far as traces tell.
    """
    parents = {gpu.mig_parent for gpu in seen.inventory.gpus if gpu.mig_parent}
    # As it was when the ledger was read, so that figures fit together.
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
            told, pid = reported.get(gpu.uuid, 0), reported_pid or worker_pids.get(entry.id, 0)
            if entry.pid_namespace == pid_namespace() and pid:
                if listed.get(pid) is not None:
                    told = listed[pid] or 0
                elif not Path(f"/proc/{pid}").exists():
                    told = 0  # what it has reported last is another program's by now, or free
            used[is_own] += min(told, nbytes)  # what is beyond its lease is taken from others
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
    """Return the cores and the main memory."""
    if seen.state is None:
        return None
    return HostRow(
        cores=seen.capacity_bytes[CORES] / 1000,
        cores_leased=seen.state.leased_bytes(CORES) / 1000,
        memory_capacity_bytes=seen.capacity_bytes.get(MEMORY),
        memory_leased_bytes=seen.state.leased_bytes(MEMORY),
    )


def run_row(seen: Seen, followed: FollowedRun) -> RunRow:
    """Return a run."""
    history, run, open_round = followed.history, followed.run, followed.history.open_round
    began = run.since if run else history.started_at
    until = seen.now if history.finished_at is None else history.finished_at
    told = [one for one in history.evaluations if one.metrics]
    # Those of training where nothing else has any.
    last = next((one for one in reversed(told) if one.task != "train"), told[-1] if told else None)
    return RunRow(
        run=followed.label,
        kind=run.kind if run else history.kind,
        folder=str(followed.folder),
        pid=followed.pid,
        seconds=None if began is None else max(0.0, until - began),
        round=history.current_round,
        num_rounds=history.num_rounds,
        task=open_round.task if open_round else "",
        messages_done=open_round.finished if open_round else None,
        messages=open_round.messages if open_round else None,
        calls_done=history.calls_done,
        metrics=dict(last.metrics) if last else {},
        metrics_round=last.round if last else None,
        outcome=followed.outcome(),
        read_part=followed.read_part,
    )


def worker_rows(seen: Seen, runs: Sequence[FollowedRun], *, others: bool) -> tuple[WorkerRow, ...]:
    """Return the workers, run by run, and then, if ``others``, the leases that belong to none of the runs."""
    holders = {entry.id: entry for entry in seen.holders}
    rows: list[WorkerRow] = []
    for followed in runs:
        history, workers, is_over = followed.history, followed.workers(), followed.is_over
        rows += [_of_worker(seen, followed, one, holders) for one in workers]
        with_worker = {"", *(worker.lease for worker in workers)}  # requests have no id yet
        rows += [
            _of_lease(seen, followed, span, holders.get(span.id))
            for span in history.leases
            # Leases of other hosts are in no ledger here.
            if span.id not in with_worker and (span.id in holders or (span.host and not is_over))
        ]
    if others:
        known = {row.lease for row in rows} | {entry.id for run in runs for entry in _for_messages(seen, run)}
        rest = [_of_entry(seen, entry) for entry in seen.holders if entry.id not in known]
        rows += sorted(rest, key=lambda row: not row.label)  # this account's first
    return tuple(rows)


def _of_worker(
    seen: Seen, followed: FollowedRun, worker: WorkerSpan, holders: Mapping[str, Entry]
) -> WorkerRow:
    """Return a worker."""
    held = holders.get(worker.lease) or followed.history.lease_of(worker)
    desc, done, total = worker.progress
    has_progress = worker.phase == "running" and worker.progress != ("", 0, None)
    return WorkerRow(
        **_held(seen, worker.lease, held, followed.history),
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


def _of_lease(seen: Seen, followed: FollowedRun, span: LeaseSpan, entry: Entry | None) -> WorkerRow:
    """Return a lease whose worker is about to start, or waits for its next message."""
    since = entry.since if entry else seen.now if span.granted_at is None else span.granted_at
    known: dict[str, Any] = {"phase": "idle"}
    if not span.is_used:  # else the next message may be another client's
        known = {"client": span.client, "task": span.task, "round": span.round, "phase": "starting"}
    return WorkerRow(
        **_held(seen, span.id, entry or span, followed.history),
        **known,
        host=span.host,
        run=followed.label,
        user=account_name(os.getuid()),
        pid=seen.report(span.id)[0] or None,
        seconds=seen.age(since),
    )


def cores_of(seen: Seen, followed: FollowedRun) -> float | None:
    """Return the cores that a run has leased for its messages, whichever worker handles them; None: none."""
    found = [entry.cores or 0.0 for entry in _for_messages(seen, followed)]
    return sum(found) if found else None


def _for_messages(seen: Seen, followed: FollowedRun) -> list[Entry]:
    """Return the leases on cores that the process of a run holds, and none of its workers."""
    if not followed.is_of_this_host:
        return []
    with_worker = {span.id for span in followed.history.leases}
    return [
        entry
        for entry in seen.holders
        if entry.pid == followed.pid
        and entry.user == os.getuid()
        and entry.pid_namespace == pid_namespace()
        and not entry.gpu_parts
        and entry.id not in with_worker
    ]


def _of_entry(seen: Seen, entry: Entry) -> WorkerRow:
    """Return a lease of which only the ledger tells."""
    return WorkerRow(
        **_held(seen, entry.id, entry, None),
        label=entry.label(),
        user=account_name(entry.user),
        pid=entry.pid,
        seconds=seen.age(entry.since),
    )


def _held(
    seen: Seen, ticket: str, lease: Entry | LeaseSpan | None, history: History | None
) -> dict[str, Any]:
    """Return the size of a lease, by the ledger or the trace."""
    parts: Mapping[str, int] = {}
    numbers: tuple[int, ...] | None = None
    if isinstance(lease, Entry):
        parts = {part.uuid: part.memory_bytes for part in lease.gpu_parts}
    elif lease is not None:
        parts = lease.memory_bytes
        if history is not None and lease.host:  # its GPUs are not here
            numbers = tuple(sorted(history.gpus[uuid].index for uuid in parts))
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
    """Return the ledger's line."""
    of_run = {
        (request.caller_pid, call_label(asdict(request))): followed.label
        for followed in runs
        for request in followed.history.waiting
        if followed.is_of_this_host and request.host in ("", platform.node())
    }
    return tuple(_waiting_row(seen, entry, of_run) for entry in (seen.state.waiting if seen.state else ()))


def _waiting_row(seen: Seen, entry: Entry, of_run: Mapping[tuple[int | None, str], str]) -> WaitingRow:
    first = entry.gpu_needs[0] if entry.gpu_needs else None
    label = entry.label()
    is_here = entry.pid_namespace == pid_namespace()
    return WaitingRow(
        lease=entry.id,
        run=of_run.get((entry.pid, label), "") if is_here else "",
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
