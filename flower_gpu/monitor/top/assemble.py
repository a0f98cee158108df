"""Puts a snapshot together from what ledger, driver and traces tell."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flower_gpu.gpu.inventory import GPU, Inventory
from flower_gpu.gpu.ledger import State
from flower_gpu.gpu.tickets import Entry, pid_namespace
from flower_gpu.monitor.spans import LeaseSpan, WorkerSpan
from flower_gpu.monitor.top.run_watch import RunWatch
from flower_gpu.monitor.top.snapshot import GPURow, WaitingRow, WorkerRow
from flower_gpu.printable import account_name


@dataclass(frozen=True)
class Seen:
    """What was seen at one moment.

    Parameters
    ----------
    now : float
        Unix seconds.
    inventory : Inventory
        The GPUs.
    temperatures : dict of str to int
        By UUID of the card.
    state : State or None
        The ledger; None where it cannot be used.
    labels : dict of str to str
        By ticket, of this account's.
    reports : dict of str to (int, dict)
        By ticket of those who hold a lease: :meth:`flower_gpu.gpu.tickets.Entry.reported`.
    peaks : dict of str to int
        By ticket, the most that was reported so far.
    """

    now: float
    inventory: Inventory
    temperatures: Mapping[str, int] = field(default_factory=dict)
    state: State | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    reports: Mapping[str, tuple[int, Mapping[str, int]]] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)

    @property
    def holders(self) -> tuple[Entry, ...]:
        """Who has a lease."""
        return self.state.holders if self.state else ()

    def used_bytes(self, ticket: str) -> int | None:
        """Return what the worker with a lease uses of its GPUs; None where it has not told."""
        pid, used = self.reports.get(ticket, (0, {}))
        return sum(used.values()) if pid else None

    def numbers(self, uuids: Iterable[str]) -> tuple[int, ...]:
        """Return the numbers of GPUs, as far as they are there."""
        index = {gpu.uuid: gpu.index for gpu in self.inventory.gpus if gpu.uuid}
        return tuple(sorted({index[uuid] for uuid in uuids if uuid in index}))


# GPUs -----------------------------------------------------------------------------------------------------


def gpu_rows(seen: Seen, worker_pids: Mapping[str, int]) -> tuple[GPURow, ...]:
    """Return the GPUs. A card in MIG mode is left out where its MIG devices are there.

    Parameters
    ----------
    seen : Seen
        What was seen.
    worker_pids : mapping of str to int
        Workers by ticket, as far as traces tell.
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
            pid = seen.reports.get(entry.id, (0, {}))[0] or worker_pids.get(entry.id, 0)
            told = seen.reports.get(entry.id, (0, {}))[1].get(gpu.uuid, 0)
            if entry.pid_namespace == pid_namespace() and pid:
                if listed.get(pid) is not None:
                    told = listed[pid] or 0
                elif not Path(f"/proc/{pid}").exists():
                    told = 0  # what it has reported last is another program's by now, or free
            used[is_own] += min(told, nbytes)  # what is beyond its lease is taken from others
    capacity = {card.uuid: card.capacity_bytes for card in seen.state.cards} if seen.state else {}
    rest = None if gpu.used_bytes is None else max(0, gpu.used_bytes - used[True] - used[False])
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
        capacity_bytes=capacity.get(gpu.uuid),
        own_leased_bytes=leased[True],
        own_used_bytes=used[True],
        other_leased_bytes=leased[False],
        other_used_bytes=used[False],
        programs_bytes=rest,
    )


# Workers --------------------------------------------------------------------------------------------------


def worker_rows(seen: Seen, runs: Sequence[tuple[str, RunWatch]], *, others: bool) -> tuple[WorkerRow, ...]:
    """Return the workers, run by run, and then the leases that belong to none.

    Parameters
    ----------
    seen : Seen
        What was seen.
    runs : sequence of (str, RunWatch)
        The runs that are shown, with what they are called.
    others : bool
        Whether leases of no such run are shown, too.
    """
    holders = {entry.id: entry for entry in seen.holders}
    rows: list[WorkerRow] = []
    for label, run in runs:
        leases = run.leases()
        shown: set[str] = set()
        for worker in run.workers():
            shown.add(worker.lease)
            rows.append(_of_worker(seen, label, worker, leases.get(worker.lease), holders))
        for id_, span in leases.items():
            # Its worker is about to start, or waits for its next message.
            if id_ in holders and id_ not in shown:
                phase = "idle" if id_ in run.used_leases else "starting"
                rows.append(_of_lease(seen, label, span, holders[id_], phase))
    if others:
        known = {row.lease for row in rows}
        rest = [_of_holder(seen, entry) for entry in seen.holders if entry.id not in known]
        rows += sorted(rest, key=lambda row: not row.label)  # this account's first
    return tuple(rows)


def _of_worker(
    seen: Seen, run: str, worker: WorkerSpan, lease: LeaseSpan | None, holders: Mapping[str, Entry]
) -> WorkerRow:
    entry = holders.get(worker.lease)
    if entry is not None:
        parts = {part.uuid: part.memory_bytes for part in entry.parts}
    else:
        parts = dict(lease.memory_bytes) if lease else {}
    desc, done, total = worker.progress
    told_progress = worker.phase == "running" and worker.progress != ("", 0, None)
    return WorkerRow(
        run=run,
        client=worker.client,
        task=worker.task,
        round=worker.round,
        label="",
        user=account_name(os.getuid()),
        pid=worker.pid,
        gpus=seen.numbers(parts),
        lease=worker.lease,
        lease_bytes=sum(parts.values()) if parts else None,
        used_bytes=seen.used_bytes(worker.lease),
        peak_bytes=seen.peaks.get(worker.lease),
        seconds=max(0.0, seen.now - worker.started_at),
        phase=worker.phase,
        progress=desc if told_progress else "",
        progress_done=done if told_progress else None,
        progress_total=total if told_progress else None,
    )


def _of_lease(seen: Seen, run: str, span: LeaseSpan, entry: Entry, phase: str) -> WorkerRow:
    # The next message of a worker that is kept may be another client's.
    is_known = phase == "starting"
    return WorkerRow(
        run=run,
        client=span.client if is_known else "",
        task=span.task if is_known else "",
        round=span.round if is_known else None,
        label="",
        user=account_name(entry.user),
        pid=seen.reports.get(entry.id, (0, {}))[0] or None,
        gpus=seen.numbers(part.uuid for part in entry.parts),
        lease=entry.id,
        lease_bytes=sum(part.memory_bytes for part in entry.parts),
        used_bytes=seen.used_bytes(entry.id),
        peak_bytes=seen.peaks.get(entry.id),
        seconds=max(0.0, seen.now - entry.since),
        phase=phase,
    )


def _of_holder(seen: Seen, entry: Entry) -> WorkerRow:
    return WorkerRow(
        run="",
        client="",
        task="",
        round=None,
        label=seen.labels.get(entry.id, ""),
        user=account_name(entry.user),
        pid=entry.pid,
        gpus=seen.numbers(part.uuid for part in entry.parts),
        lease=entry.id,
        lease_bytes=sum(part.memory_bytes for part in entry.parts),
        used_bytes=seen.used_bytes(entry.id),
        peak_bytes=seen.peaks.get(entry.id),
        seconds=max(0.0, seen.now - entry.since),
        phase="held",
    )


# Those who wait -------------------------------------------------------------------------------------------


def waiting_rows(seen: Seen, runs: Sequence[tuple[str, RunWatch]]) -> tuple[WaitingRow, ...]:
    """Return the ledger's line."""
    of_run = {
        (request.caller_pid, _label(request)): name
        for name, run in runs
        if run.is_of_this_host
        for request in run.requests()
    }
    rows = []
    for entry in seen.state.waiting if seen.state else ():
        first = entry.options[0] if entry.options else None
        label = seen.labels.get(entry.id, "")
        is_here = entry.pid_namespace == pid_namespace()
        rows.append(
            WaitingRow(
                lease=entry.id,
                run=of_run.get((entry.pid, label), "") if is_here else "",
                label=label,
                user=account_name(entry.user),
                pid=entry.pid,
                asked_bytes=first.memory_bytes if first else None,
                asked_share=first.share if first else None,
                asked_alone=bool(first and first.alone),
                count=entry.count,
                gpus=seen.numbers(option.uuid for option in entry.options),
                seconds=max(0.0, seen.now - entry.since),
            )
        )
    return tuple(rows)


def _label(request: LeaseSpan) -> str:
    """Return what its ticket is labelled with."""
    if request.client == "server":
        return f"{request.task} on the server"
    return f"{request.task} of client {request.client}"
