"""The parts of the benchmark, on the stub host of its environment, in a process that is light to fork.

A crowd of processes with random requests, killed at random points, and one that watches; what it costs to
lease without competition, and to wait in a long line.
"""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kill_at_line import kill_at_line
from nvml_stub import GIB, used

from benchmarks.leases.processes import RESERVE_BYTES, claimant, end_of, fork, stop_using, use
from benchmarks.shared.member import serve
from flower_gpu.gpu import inventory
from flower_gpu.leases.admission import CORES, MEMORY, HostNeed
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.polling import readable

_CROWD_TIMEOUT_S = 300.0
_CROWD_HOLD_S = 0.1  # on average
_LINES = 600  # of the ledger's code that a process runs which has to wait a little
_HOLD_S = 0.01
_TIMEOUT_S = 120.0


def measure_crowd(numbers: random.Random, processes: int) -> dict[str, Any]:
    """Let a crowd lease, kill a third of it, and return what an observer saw."""
    read, write = os.pipe()
    stop, end = os.pipe()
    observer = fork(lambda: _watch(stop, write))
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
        os.kill(pid, signal.SIGKILL)  # nobody has waited for it yet, so it is no other's number
    statuses = end_of(pids, _CROWD_TIMEOUT_S)
    took_s = time.monotonic() - started
    os.write(end, b"1")
    with open(read) as told:
        seen = json.load(told)
    os.waitpid(observer, 0)
    for descriptor in (stop, end):
        os.close(descriptor)
    for pid in set(pids) - set(statuses):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ended = list(statuses.values())
    finished, killed = ended.count(0), ended.count(-signal.SIGKILL)
    return {
        **seen,
        "processes": processes,
        "finished": finished,
        "killed": killed,
        "unfinished": processes - finished - killed,
        "left_over": _left_over(),
        "crowd_s": round(took_s, 2),
    }


def _member(numbers: random.Random, doomed: bool) -> Callable[[], None]:
    """Return what a process does: lease something at random, use it, give it back."""

    def lease() -> None:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        asked = _random_claimant(numbers)
        hold_s = numbers.expovariate(1 / _CROWD_HOLD_S)
        if doomed and numbers.random() < 0.5:
            kill_at_line(numbers.randrange(_LINES))
        ticket = ledger.acquire(asked)
        use(ticket, numbers.uniform(0.3, 1.0))
        time.sleep(hold_s)
        stop_using(ticket)
        ledger.release(ticket)
        if doomed:
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
    """What the observer has seen."""

    capacity: dict[str, int]
    observations: int = 0
    peak_leased_bytes: int = 0
    over_capacity_instants: int = 0
    peak_holders: int = 0
    peak_waiting: int = 0
    peak_used_bytes: int = 0
    over_used_instants: int = 0
    twice: int = field(default=0)

    def look(self, ledger: Ledger) -> None:
        state = ledger.status()  # with the mutex: nothing is half done
        leased = {uuid: state.leased_bytes(uuid) for uuid in self.capacity}
        in_use = {uuid: used(uuid) for uuid in self.capacity}
        ids = [entry.id for entry in (*state.holders, *state.waiting)]
        self.observations += 1
        self.peak_leased_bytes = max(self.peak_leased_bytes, sum(leased.values()))
        self.peak_used_bytes = max(self.peak_used_bytes, sum(in_use.values()))
        self.peak_holders = max(self.peak_holders, len(state.holders))
        self.peak_waiting = max(self.peak_waiting, len(state.waiting))
        self.over_capacity_instants += any(leased[uuid] > size for uuid, size in self.capacity.items())
        self.over_used_instants += any(in_use[uuid] > size for uuid, size in self.capacity.items())
        self.twice += len(ids) != len(set(ids))


def _watch(stop: int, report: int) -> None:
    """Look until told to stop, then report what was seen."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    seen = _Seen(ledger.sizes(inventory.take().usable))
    while not readable([stop], 0.001):
        seen.look(ledger)
    figures = {"capacity_bytes": sum(seen.capacity.values()), **vars(seen)}
    del figures["capacity"]
    figures["seen_twice"] = figures.pop("twice")
    os.write(report, json.dumps(figures).encode())


def _left_over() -> int:
    """Return how many files of tickets are there after the next request has looked."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    ledger.release(ledger.acquire(claimant(share=1.0, count=2), deadline=time.monotonic() + 10))
    with suppress(FileNotFoundError):
        return len(list(ledger.folder.own().iterdir()))
    return 0


def measure_alone(numbers: random.Random, runs: int) -> dict[str, Any]:
    """Return how long acquire and release take together: of a GPU, of cores and memory, and of all these."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    of_gpu = claimant(memory_bytes=GIB)
    needs = (HostNeed(CORES, 500, 500), HostNeed(MEMORY, 64 << 20, 64 << 20))
    found: dict[str, Any] = {}
    for name, asked in (
        ("acquire_release", of_gpu),
        ("cores_acquire_release", replace(of_gpu, count=0, host_needs=lambda: needs)),
        ("gpu_and_cores_acquire_release", replace(of_gpu, host_needs=lambda: needs)),
    ):
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            ledger.release(ledger.acquire(asked))
            times.append(time.perf_counter() - start)
        found[f"{name}_median_ms"] = round(statistics.median(times) * 1000, 3)
        found[f"{name}_max_ms"] = round(max(times) * 1000, 3)
    return found


def measure_waiting(numbers: random.Random, waiters: int, seconds: int) -> dict[str, Any]:
    """Let processes wait for GPUs that are taken; then end the holder and the first in line."""
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
            raise RuntimeError(f"after {_TIMEOUT_S:g} s, {len(waiting)} of {waiters} wait")
    lined_up_s = time.monotonic() - start
    time.sleep(min(2.0, seconds))  # what they have to do first does not count
    before, start = _cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    waited_s = time.monotonic() - start
    cpu_s = _cpu_s(pids) - before

    killed = time.monotonic()
    for pid in (waiting[0].pid, holder):
        os.kill(pid, signal.SIGKILL)
    granted_at = [float(line) for line in _lines(read)]
    statuses = end_of([holder, *pids], _TIMEOUT_S)
    os.close(read)
    return {
        "waiters": waiters,
        "lined_up_s": round(lined_up_s, 2),
        "waiter_cpu_s_per_minute": round(cpu_s * 60 / waited_s, 3),
        "next_after_kill_s": round(min(granted_at) - killed, 3) if granted_at else None,
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
    time.sleep(_HOLD_S)
    ledger.release(ticket)


def _lines(descriptor: int) -> list[bytes]:
    """Read lines until all who write there are gone."""
    data = b""
    while readable([descriptor], _TIMEOUT_S):
        more = os.read(descriptor, 65536)
        if not more:
            break
        data += more
    return data.splitlines()


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the time that processes have run, to the nanosecond where the kernel tells it."""
    total = 0.0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
        except FileNotFoundError:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "crowd": measure_crowd,
    "alone": measure_alone,
    "waiting": measure_waiting,
}


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    numbers = random.Random(int(sys.argv[1]))
    return lambda request: PARTS[request.pop("part")](numbers=numbers, **request)


if __name__ == "__main__":
    serve(prepare)
