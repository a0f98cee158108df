"""A thousand calls leave no process, descriptor or memory behind, neither in the caller nor in its server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forkservers
import numpy as np
import pytest
from forkservers import only_server
from processes import (
    SHARED_MEMORY,
    all_processes,
    children_of,
    new_in_shared_memory,
    wait_until,
    zombies_of,
)

from flower_gpu import run_in_worker
from flower_gpu.workers.forkserver import client

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3"),
]

CALLS = 1000
THREADS = 8
# What a process may have more after a thousand calls: fragments, not even 20 kB for each of them.
SLACK_MB = 16


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    resident_mb: float
    maps: int


def held(pid: int) -> Held:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    maps = (folder / "maps").read_text().count("\n")
    return Held(len(list((folder / "fd").iterdir())), int(status["VmRSS"].split()[0]) / 1024, maps)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """A server that has settled, and a caller whose caches are warm."""
    with forkservers.own_servers():
        call_in_threads(THREADS * 5)
        for _ in range(50):
            call()
        yield only_server().pid


def call() -> int:
    """Pass weights of 1 MB, and have them changed."""
    weights = [np.full(1 << 17, 1.0)]
    changed, parent = run_in_worker("tasks_forkserver:plus_one", weights, start_method="forkserver")
    assert changed[0][0] == changed[0][-1] == 2.0
    assert isinstance(parent, int)
    return parent


def call_in_threads(calls: int) -> set[int]:
    servers: set[int] = set()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            servers.update(call() for _ in range(calls // THREADS))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return servers


@pytest.mark.parametrize(("calls", "in_threads"), [(CALLS, False), (400, True)])
def test_nothing_is_left(server: int, calls: int, in_threads: bool) -> None:
    caller = os.getpid()
    before = {pid: settled(pid) for pid in (caller, server)}
    shared = set(SHARED_MEMORY.iterdir())
    processes = {process.pid for process in all_processes() if process.parent in before}
    calls_before = only_server().calls

    if in_threads:
        assert call_in_threads(calls) == {server}
    else:
        assert {call() for _ in range(calls)} == {server}

    assert only_server().calls == calls_before + calls
    assert wait_until(lambda: held(server).descriptors <= before[server].descriptors)
    for pid in before:
        assert zombies_of(pid) == []
        assert wait_until(lambda pid=pid: set(children_of(pid)) <= processes), children_of(pid)
        after = held(pid)
        assert after.descriptors <= before[pid].descriptors
        assert after.resident_mb < before[pid].resident_mb + SLACK_MB, (before[pid], after)
        assert after.maps <= before[pid].maps + 20, (before[pid], after)
    assert wait_until(lambda: not new_in_shared_memory(shared)), new_in_shared_memory(shared)


def settled(pid: int) -> Held:
    """Return what a process holds, once it has got rid of what earlier calls left for a moment."""
    seen = [held(pid).descriptors]

    def is_settled() -> bool:
        threading.Event().wait(0.05)
        seen.append(held(pid).descriptors)
        return seen[-1] == seen[-2]

    assert wait_until(is_settled)
    return held(pid)
