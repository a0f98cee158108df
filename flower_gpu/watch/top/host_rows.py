"""The hosts of a run on a Ray cluster, as its trace tells: their ledgers and drivers cannot be asked here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from flower_gpu.watch.followed_run import FollowedRun
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import HostSpan


@dataclass(frozen=True)
class RunHostRow:
    """A host of a run on a Ray cluster. Its GPUs are summed up."""

    run: str
    host: str
    seconds: float | None  # since it joined
    messages: int  # under way
    concurrency: int  # at most so many are
    calls_done: int
    calls_failed: int
    cores: int | None
    gpus: int
    total_bytes: int | None  # of its GPUs; None where it has none
    used_bytes: int | None  # by anybody
    leased_bytes: int | None  # to this run
    utilization_percent: float | None  # their mean
    lost: str | None  # why it is lost; None while it is there


def run_host_rows(followed: FollowedRun, now: float) -> list[RunHostRow]:
    """Return the hosts that a run has or has lost, in the order in which they joined."""
    hosts = followed.history.hosts.values()
    return [_row(followed, host, now) for host in hosts if host.nodes or host.is_lost]


def _row(followed: FollowedRun, host: HostSpan, now: float) -> RunHostRow:
    history = followed.history
    gpus = [history.gpus[uuid] for uuid in host.gpus if uuid in history.gpus]
    samples = [found[-1] if (found := history.samples.get(gpu.uuid)) else None for gpu in gpus]
    busy = [one.utilization_percent for one in samples if one and one.utilization_percent is not None]
    is_there = not host.is_lost and not followed.is_over
    return RunHostRow(
        run=followed.label,
        host=host.name,
        seconds=None if host.joined_at is None else max(0.0, now - host.joined_at),
        messages=history.messages_under_way(host.name) if is_there else 0,
        concurrency=host.concurrency,
        calls_done=host.calls_done,
        calls_failed=host.calls_failed,
        cores=host.cores,
        gpus=len(gpus),
        total_bytes=_sum(gpu.total_bytes for gpu in gpus),
        used_bytes=_sum(one.used_bytes if one else None for one in samples) if is_there else None,
        leased_bytes=_leased_bytes(history, host.name) if gpus and is_there else None,
        utilization_percent=round(fmean(busy), 1) if busy and is_there else None,
        lost=(host.lost_reason or "no reason told") if host.is_lost else None,
    )


def _leased_bytes(history: History, host: str) -> int:
    held = [one for one in history.leases if one.host == host and one.released_at is None]
    return sum(sum(one.memory_bytes.values()) for one in held)


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return the sum; None where one is not known, or there is none."""
    found = list(sizes)
    known = [nbytes for nbytes in found if nbytes is not None]
    return sum(known) if found and len(known) == len(found) else None
