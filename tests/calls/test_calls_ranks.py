"""A call on several GPUs has one rank for each GPU and one lease for all, which is released at the end."""

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


def report_of_rank(host: CallsHost, number: int) -> dict[str, Any]:
    """Wait until a rank has allocated its memory, and return the rank's report."""
    path = host.folder / f"report-{number}"
    deadline = time.monotonic() + WAIT_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.fixture
def host(calls_host: CallsHost) -> CallsHost:
    calls_host.add_gpu()
    # Ranks need torch.
    del calls_host.env["LIGHT_SERVERS"]
    return calls_host


def used_bytes(host: CallsHost, uuids: list[str]) -> list[int]:
    return [nvml_stub._used(host.folder / "stub", uuid) for uuid in uuids]


def start(host: CallsHost, method: str) -> tuple[Any, list[dict[str, Any]]]:
    caller = host.start()
    caller.send(
        "run", "calls_rank_tasks:hold", str(host.folder), "go", num_gpus=2, start_method=method, timeout_s=120
    )
    return caller, [report_of_rank(host, 0), report_of_rank(host, 1)]


@pytest.mark.parametrize("method", METHODS)
def test_each_rank_has_one_gpu_of_the_lease(host: CallsHost, method: str) -> None:
    caller, ranks = start(host, method)
    uuids = [report["visible"] for report in ranks]
    assert len(set(uuids)) == 2
    shares = [json.loads(report["lease"])["shares"] for report in ranks]
    assert [[share["uuid"] for share in rank_shares] for rank_shares in shares] == [[uuids[0]], [uuids[1]]]
    # The ledger knows the memory use of all ranks.
    expected = {uuids[0]: 2 * GIB, uuids[1]: 3 * GIB}

    def is_up_to_date(state: Any) -> bool:
        [holder] = state["holders"]
        return holder["used"] == expected

    state = host.until(is_up_to_date)
    assert state["holders"][0]["parts"].keys() == set(uuids)
    (host.folder / "go").touch()
    assert caller.answer() == 1
    host.until_free()
    assert used_bytes(host, uuids) == [0, 0]
    [finished] = host.trace("worker_finished")
    assert {gpu["uuid"]: gpu["peak_bytes"] for gpu in finished["gpus"]} == expected
    assert len(host.trace("lease_granted")) == 1


@pytest.mark.parametrize("killed", ["rank", "worker", "caller"])
def test_a_killed_process_frees_the_lease_and_all_memory(host: CallsHost, killed: str) -> None:
    caller, ranks = start(host, "forkserver")
    pids = [report["pid"] for report in ranks]
    [started] = host.trace("worker_started")
    os.kill({"rank": pids[1], "worker": started["pid"], "caller": caller.pid}[killed], signal.SIGKILL)
    if killed != "caller":
        error = caller.failure()
        assert error.name == {"rank": "RankError", "worker": "WorkerDiedError"}[killed]
        assert ("rank 1 of 2 (GPU " in error.text) == (killed == "rank")
    host.until_free()
    # The lease is held as long as any of these processes lives.
    assert all(is_gone(pid) for pid in (*pids, started["pid"]))
    until(
        lambda: used_bytes(host, [report["visible"] for report in ranks]) == [0, 0],
        "the dead ranks' memory is free",
    )


@pytest.mark.parametrize("on_oom", ["retry", "cpu"])
def test_a_rank_runs_out_of_memory(host: CallsHost, on_oom: str) -> None:
    caller = host.start()
    arguments = ("run", "calls_rank_tasks:run_out")
    # The CPU gets the same number of ranks.
    if on_oom == "cpu":
        assert caller(*arguments, num_gpus=2, on_oom=on_oom) == [2, ""]
    else:
        error = caller.fails(*arguments, num_gpus=2, on_oom=on_oom)
        assert error.name == "GPUOutOfMemoryError"
        assert "rank 1: out of memory on GPU " in error.text
    [event] = host.trace("out_of_memory")
    assert event["rank"] == 1
    host.until_free()
