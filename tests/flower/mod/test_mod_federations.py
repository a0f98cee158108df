"""A whole federation with ``gpu_mod``: SuperNodes, a process for each message, a worker for each call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import StubHost, launcher
from mod_host import FOLDER
from nvml_stub import GIB

from flower_gpu.leases.admission import SHARED_PART

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BUDGET = 16 * GIB - (256 << 20)  # of a GPU, next to the reserve


def test_four_supernodes_with_four_requests_of_which_three_fail_in_the_first_round(tmp_path: Path) -> None:
    """One raises, one is killed, one takes too long; in the second round all of them are there again."""
    host = StubHost(tmp_path / "host", gpus=2)
    nodes: list[dict[str, Any]] = [
        {"gpu-memory": "7GiB"},
        {"num-gpus": 0.25},
        {"num-gpus": 1},
        {},  # what the app says
    ]
    with host.observed() as seen:
        done = launcher(tmp_path)(
            FOLDER / "leases_app",
            *("--clients", "4", "--timeout-s", "15"),
            command=[sys.executable, str(FOLDER / "mod_launcher.py")],
            # The app imports the stub, to use what it has leased.
            env={
                **host.env,
                "PYTHONPATH": str(FOLDER.parents[1]),
                "MOD_TEST_NODE_CONFIGS": json.dumps(nodes),
            },
        )
    assert done.code == 0, done.output + done.logs()
    assert "leases: client 0: 7.0 GiB of one GPU for a call" in done.output

    # Our FedAvg on Flower's grid: integers stay integers, and no client evaluates.
    assert [entry["loss"] for entry in done.result["rounds"]] == [1.0, 2.0]
    log = done.log("run")
    assert "steps: 2 int64; evaluated by clients: 0" in log
    assert "Received 1 results and 3 failures" in log and "Received 4 results and 0 failures" in log
    assert "train of client 1: ValueError: the data are gone" in log
    assert "train of client 2: the worker (pid " in log and "was killed by SIGKILL (9)" in log
    assert "these are the last words" in log
    assert "train of client 3: no result within timeout_s=15" in log
    # The state of the failed calls was not taken over: their next round is their first.
    assert f"round 2: state has counted {(2 + 3 * 1) / 4:.4f} rounds" in log

    of_clients = [one for one in done.events("worker_finished") if one["client"] != "server"]
    first, second = ({one["client"]: one for one in of_clients if one["round"] == each} for each in (1, 2))
    assert {one["start_method"] for one in of_clients} == {"fork"}
    outcomes = {client: one["outcome"] for client, one in first.items()}
    assert outcomes == {"0": "ok", "1": "error", "2": "died", "3": "timeout"}
    # Flower by itself misses a process that has died when its heartbeat does not come, after 30 s and more.
    assert first["2"]["seconds"] < 30

    whole = int(BUDGET * SHARED_PART)
    asked = [7 * GIB, int(whole * 0.25), whole, 3 * GIB]
    granted = done.events("lease_granted")
    for one in granted:
        [gpu] = one["gpus"]
        assert gpu["memory_bytes"] >> 20 == asked[int(one["client"])] >> 20
    # The workers' allocator had a cap below that, with room for CUDA's context.
    assert len(second) == 4
    for client, one in second.items():
        [gpu] = one["gpus"]
        assert gpu["cap_bytes"] < gpu["lease_bytes"] and gpu["lease_bytes"] >> 20 == asked[int(client)] >> 20
        assert gpu["peak_bytes"] == gpu["lease_bytes"], "each of them has used all that it has leased"

    most = dict.fromkeys(host.uuids, 0)
    for holders in seen:
        for uuid in host.uuids:
            most[uuid] = max(most[uuid], sum(parts.get(uuid, 0) for parts in holders.values()))
    assert all(0 < leased <= BUDGET for leased in most.values()), most
    leases = {event["lease"] for event in granted}
    assert set().union(*seen) <= leases and len(leases) == 8
    assert max(len(holders) for holders in seen) >= 2, "they share"
    assert not host.status().holders
