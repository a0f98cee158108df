"""The parts, on a stub host, in a member small enough for hundreds of forks."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kill_at_line import kill_at_line
from nvml_stub import GIB, used

from benchmarks.leases.processes import RESERVE_BYTES, claimant, fork, stop_using, use, wait_for
from benchmarks.shared.member import Answer, serve
from benchmarks.shared.processes import cpu_times_s
from flower_gpu.gpu import inventory
from flower_gpu.leases.admission import CORES, MEMORY, HostNeed
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.polling import readable

_CROWD_TIMEOUT_S = 300.0
_MEAN_HOLD_S = 0.1
#: A process that waits a little runs about this many lines of the ledger's code.
_LINES = 600
_TIMEOUT_S = 120.0
_DRAIN_HOLD_S = 0.01


def measure_crowd(numbers: random.Random, processes: int) -> dict[str, Any]:
    """Let a crowd of processes lease, kill a third of them, and return what an observer saw."""
    read, write = os.pipe()
    stopped, stop = os.pipe()
    observer = fork(lambda: _watch(stopped, write))
    os.close(write)
    doomed = set(numbers.sample(range(processes), processes // 3))
    pids: list[int] = []
    kills: list[tuple[float, int]] = []
    started = time.monotonic()
    for number in range(processes):
        pids.append(fork(_member(random.Random(numbers.random()), number in doomed)))
        if number in doomed:
            kills.append((time.monotonic() + numbers.uniform(0, 3), pids[-1]))
    for at, pid in sorted(kills):
        time.sleep(max(0.0, at - time.monotonic()))
        # No process has waited for it yet, so the pid cannot belong to another process.
        os.kill(pid, signal.SIGKILL)
    statuses = wait_for(pids, _CROWD_TIMEOUT_S)
    crowd_s = time.monotonic() - started
    os.write(stop, b"1")
    with open(read) as report:
        seen = json.load(report)
    os.waitpid(observer, 0)
    for descriptor in (stopped, stop):
        os.close(descriptor)
    for pid in set(pids) - set(statuses):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    codes = list(statuses.values())
    finished, killed = codes.count(0), codes.count(-signal.SIGKILL)
    return {
        **seen,
        "finished": finished,
        "killed": killed,
        "unfinished": processes - finished - killed,
        "left_over": _left_over(),
        "crowd_s": round(crowd_s, 2),
    }


def _member(numbers: random.Random, is_doomed: bool) -> Callable[[], None]:
    """Return the work of one process: acquire a random lease, use it, and release it."""

    def lease() -> None:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        request = _random_claimant(numbers)
        hold_s = numbers.expovariate(1 / _MEAN_HOLD_S)
        if is_doomed and numbers.random() < 0.5:
            kill_at_line(numbers.randrange(_LINES))
        ticket = ledger.acquire(request)
        use(ticket, numbers.uniform(0.3, 1.0))
        time.sleep(hold_s)
        stop_using(ticket)
        ledger.release(ticket)
        if is_doomed:
            time.sleep(_CROWD_TIMEOUT_S)

    return lease


def _random_claimant(numbers: random.Random) -> Claimant:
    kind = numbers.random()
    if kind < 0.4:
        return claimant(memory_bytes=int(numbers.uniform(0.7, 8) * GIB))
    if kind < 0.5:
        return claimant(memory_bytes=int(numbers.uniform(8, 14) * GIB))
    if kind < 0.85:
        return claimant(share=numbers.choice([0.125, 0.25, 0.5, 1.0]))
    return claimant(memory_bytes=int(numbers.uniform(1, 8) * GIB), count=2)


@dataclass
class _Seen:
    """Figures of the observer."""

    capacity_bytes: int
    observations: int = 0
    peak_leased_bytes: int = 0
    over_capacity_instants: int = 0
    peak_holders: int = 0
    peak_waiting: int = 0
    peak_used_bytes: int = 0
    over_used_instants: int = 0
    seen_twice: int = 0

    def look(self, ledger: Ledger, capacity: dict[str, int]) -> None:
        # status() holds the mutex, so no request is half done.
        state = ledger.status()
        leased = {uuid: state.leased_bytes(uuid) for uuid in capacity}
        in_use = {uuid: used(uuid) for uuid in capacity}
        ids = [entry.id for entry in (*state.holders, *state.waiting)]
        self.observations += 1
        self.peak_leased_bytes = max(self.peak_leased_bytes, sum(leased.values()))
        self.peak_used_bytes = max(self.peak_used_bytes, sum(in_use.values()))
        self.peak_holders = max(self.peak_holders, len(state.holders))
        self.peak_waiting = max(self.peak_waiting, len(state.waiting))
        self.over_capacity_instants += any(leased[uuid] > size for uuid, size in capacity.items())
        self.over_used_instants += any(in_use[uuid] > size for uuid, size in capacity.items())
        self.seen_twice += len(ids) != len(set(ids))


def _watch(stopped: int, report: int) -> None:
    """Observe the ledger until the pipe is readable, then write the figures."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    capacity = ledger.sizes(inventory.take().usable)
    seen = _Seen(sum(capacity.values()))
    while not readable([stopped], 0.001):
        seen.look(ledger, capacity)
    os.write(report, json.dumps(vars(seen)).encode())


def _left_over() -> int:
    """Return the number of ticket files after one more request, which removes stale tickets."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    ledger.release(ledger.acquire(claimant(share=1.0, count=2), deadline=time.monotonic() + 10))
    with suppress(FileNotFoundError):
        return len(list(ledger.folder.own_folder().iterdir()))
    return 0


def measure_alone(numbers: random.Random, runs: int) -> dict[str, Any]:
    """Return the time of acquire and release: of a GPU, of cores and memory, and of both in one ticket."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    gpu = claimant(memory_bytes=GIB)
    needs = (HostNeed(CORES, 500, 500), HostNeed(MEMORY, 64 << 20, 64 << 20))
    figures: dict[str, Any] = {}
    for name, request in (
        ("acquire_release", gpu),
        ("cores_acquire_release", replace(gpu, count=0, host_needs=lambda: needs)),
        ("gpu_and_cores_acquire_release", replace(gpu, host_needs=lambda: needs)),
    ):
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            ledger.release(ledger.acquire(request))
            times.append(time.perf_counter() - start)
        figures[f"{name}_median_ms"] = round(statistics.median(times) * 1000, 3)
        figures[f"{name}_max_ms"] = round(max(times) * 1000, 3)
    return figures


def measure_waiting(numbers: random.Random, waiters: int, seconds: int) -> dict[str, Any]:
    """Let processes wait for leased GPUs; then kill the holder and the first process of the queue."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    read, write = os.pipe()
    holder = fork(_hold)
    while not ledger.status().holders:
        time.sleep(0.01)
    start = time.monotonic()
    pids = [fork(lambda: _wait(write)) for _ in range(waiters)]
    os.close(write)
    while len(waiting := ledger.status().waiting) < waiters:
        time.sleep(0.1)
        if time.monotonic() > start + _TIMEOUT_S:
            raise RuntimeError(f"after {_TIMEOUT_S:g} s, {len(waiting)} of {waiters} processes are waiting")
    lined_up_s = time.monotonic() - start
    time.sleep(min(2.0, seconds))  # Exclude the work at the start of a wait.
    before, start = _cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    waited_s = time.monotonic() - start
    cpu_s = _cpu_s(pids) - before

    killed_at = time.monotonic()
    for pid in (waiting[0].pid, holder):
        os.kill(pid, signal.SIGKILL)
    granted_at = [float(line) for line in _lines(read)]
    statuses = wait_for([holder, *pids], _TIMEOUT_S)
    os.close(read)
    return {
        "lined_up_s": round(lined_up_s, 2),
        "waiter_cpu_s_per_minute": round(cpu_s * 60 / waited_s, 3),
        "next_after_kill_s": round(min(granted_at) - killed_at, 3) if granted_at else None,
        "drain_s": round(max(granted_at) - min(granted_at), 3) if granted_at else None,
        "drained": list(statuses.values()).count(0),
    }


def _hold() -> None:
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    ticket = ledger.acquire(claimant(share=1.0, count=2))
    time.sleep(3600)
    ledger.release(ticket)


def _wait(granted: int) -> None:
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    ticket = ledger.acquire(claimant(share=1.0))
    os.write(granted, json.dumps(time.monotonic()).encode() + b"\n")
    time.sleep(_DRAIN_HOLD_S)
    ledger.release(ticket)


def _lines(descriptor: int) -> list[bytes]:
    """Read lines until every writer has exited."""
    data = b""
    while readable([descriptor], _TIMEOUT_S):
        more = os.read(descriptor, 65536)
        if not more:
            break
        data += more
    return data.splitlines()


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds of processes."""
    try:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9
    except FileNotFoundError:
        # Kernels without schedstat count in ticks of 10 ms.
        return sum(sum(cpu_times_s(pid)[:2]) for pid in pids)


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "crowd": measure_crowd,
    "alone": measure_alone,
    "waiting": measure_waiting,
}


def prepare() -> Answer:
    numbers = random.Random(int(sys.argv[1]))
    return lambda request: PARTS[request.pop("part")](numbers=numbers, **request)


if __name__ == "__main__":
    serve(prepare)
