"""What it costs to lease without competition, and to wait in a long line."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvml_stub import GIB

from benchmarks.leases.processes import RESERVE_BYTES, end_of, fork, wish
from flower_gpu.leases.ledger import Ledger

_HOLD_S = 0.01
_TIMEOUT_S = 120.0


def measure_alone(numbers: random.Random, runs: int) -> dict[str, Any]:
    """Return how long acquire and release take together."""
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    asked = wish(memory_bytes=GIB)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        ledger.release(ledger.acquire(asked))
        times.append(time.perf_counter() - start)
    return {
        "acquire_release_median_ms": round(statistics.median(times) * 1000, 3),
        "acquire_release_max_ms": round(max(times) * 1000, 3),
    }


def measure(numbers: random.Random, waiters: int, seconds: int) -> dict[str, Any]:
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
    Ledger(reserve_bytes=RESERVE_BYTES).acquire(wish(share=1.0, count=2))
    time.sleep(3600)


def _wait(granted: int) -> None:
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    ticket = ledger.acquire(wish(share=1.0))
    os.write(granted, json.dumps(time.monotonic()).encode() + b"\n")
    time.sleep(_HOLD_S)
    ledger.release(ticket)


def _lines(descriptor: int) -> list[bytes]:
    """Read lines until all who write there are gone."""
    data = b""
    while select.select([descriptor], [], [], _TIMEOUT_S)[0]:
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
