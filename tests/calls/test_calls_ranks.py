"""A call on several GPUs: one rank for each, one lease for all of them, and all of it back at the end."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import nvml_stub
import pytest
from calls_host import METHODS, WAIT_S, CallsHost, is_gone
from nvml_stub import GIB
from waiting import until

pytestmark = pytest.mark.timeout(180)


def told(host: CallsHost, number: int) -> dict[str, Any]:
    """Wait until a rank holds its memory; return what it sees."""
    path = host.folder / f"told-{number}"
    deadline = time.monotonic() + WAIT_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture
def host(calls_host: CallsHost) -> CallsHost:
    calls_host.add_gpu()
    del calls_host.env["LIGHT_SERVERS"]  # ranks have torch
    return calls_host


def used(host: CallsHost, uuids: list[str]) -> list[int]:
    return [nvml_stub._used(host.folder / "stub", uuid) for uuid in uuids]


def start(host: CallsHost, method: str) -> tuple[Any, list[dict[str, Any]]]:
    caller = host.start()
    caller.tell(
        "run", "calls_rank_tasks:hold", str(host.folder), "go", num_gpus=2, start_method=method, timeout_s=120
    )
    return caller, [told(host, 0), told(host, 1)]


@pytest.mark.parametrize("method", METHODS)
def test_each_rank_has_one_gpu_of_the_lease(host: CallsHost, method: str) -> None:
    caller, ranks = start(host, method)
    uuids = [one["visible"] for one in ranks]
    assert len(set(uuids)) == 2
    shares = [json.loads(one["lease"])["shares"] for one in ranks]
    assert [[share["uuid"] for share in own] for own in shares] == [[uuids[0]], [uuids[1]]]
    # The ledger knows what all of them use.
    expected = {uuids[0]: 2 * GIB, uuids[1]: 3 * GIB}

    def knows(state: Any) -> bool:
        [holder] = state["holders"]
        return holder["used"] == expected

    state = host.until(knows)
    assert state["holders"][0]["parts"].keys() == set(uuids)
    (host.folder / "go").touch()
    assert caller.answer() == 1
    host.until_free()
    assert used(host, uuids) == [0, 0]
    [finished] = host.trace("worker_finished")
    assert {one["uuid"]: one["peak_bytes"] for one in finished["gpus"]} == expected
    assert len(host.trace("lease_granted")) == 1


@pytest.mark.parametrize("who", ["rank", "worker", "caller"])
def test_whoever_is_killed_all_is_back(host: CallsHost, who: str) -> None:
    caller, ranks = start(host, "forkserver")
    pids = [one["pid"] for one in ranks]
    [started] = host.trace("worker_started")
    os.kill({"rank": pids[1], "worker": started["pid"], "caller": caller.pid}[who], signal.SIGKILL)
    if who != "caller":
        error = caller.failure()
        assert error.name == {"rank": "RankError", "worker": "WorkerDiedError"}[who]
        assert ("rank 1 of 2 (GPU " in error.text) == (who == "rank")
    host.until_free()
    assert all(is_gone(pid) for pid in (*pids, started["pid"]))  # it is held as long as one of them lives
    until(lambda: used(host, [one["visible"] for one in ranks]) == [0, 0], "memory of the dead is free")


@pytest.mark.parametrize("on_oom", ["retry", "cpu"])
def test_a_rank_runs_out_of_memory(host: CallsHost, on_oom: str) -> None:
    caller = host.start()
    arguments = ("run", "calls_rank_tasks:run_out")
    if on_oom == "cpu":  # as many ranks there
        assert caller(*arguments, num_gpus=2, on_oom=on_oom) == [2, ""]
    else:
        error = caller.fails(*arguments, num_gpus=2, on_oom=on_oom)
        assert error.name == "GPUOutOfMemoryError"
        assert "rank 1: out of memory on GPU " in error.text
    [out] = host.trace("out_of_memory")
    assert out["rank"] == 1
    host.until_free()
