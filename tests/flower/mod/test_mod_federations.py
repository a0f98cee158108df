"""Whole federations with ``gpu_mod``: SuperNodes, a process for each message, a worker for each call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import COMMAND, Launch, assert_nothing_left
from mod_host import FOLDER, ModHost, events_of
from nvml_stub import GIB
from waiting import until

from flower_gpu.leases.admission import SHARED_PART

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BUDGET = 16 * GIB - (256 << 20)  # of a GPU, next to the reserve


def launch_env(host: ModHost) -> dict[str, str]:
    """The host's variables; the launcher names its own folder for the trace."""
    return {name: value for name, value in host.env.items() if name != "FLOWER_GPU_RUN_DIR"}


def test_six_supernodes_with_three_requests_are_each_held_to_their_own(
    launch: Launch, tmp_path: Path
) -> None:
    host = ModHost(tmp_path / "host", gpus=2)
    nodes: list[dict[str, Any]] = [
        *({"gpu-memory": "7GiB"} for _ in range(2)),
        *({"num-gpus": 0.25} for _ in range(2)),
        {"num-gpus": 1},
        {},  # what the app says
    ]
    with host.observed() as seen:
        done = launch(
            FOLDER / "leases_app",
            *("--clients", "6"),
            command=[sys.executable, str(FOLDER / "mod_launcher.py")],
            env={**launch_env(host), "MOD_TEST_NODE_CONFIGS": json.dumps(nodes)},
        )
    assert done.code == 0, done.output + done.logs()
    assert "weights: [1.0, 1.0, 1.0, 1.0]" in done.log("run")
    assert "leases: client 0 and client 1: 7.0 GiB of one GPU for a call" in done.output

    share = int(BUDGET * SHARED_PART * 0.25)
    asked = [7 * GIB] * 2 + [share] * 2 + [int(BUDGET * SHARED_PART), 2 * GIB]
    granted = {event["client"]: event["gpus"] for event in events_of(done.folder, "lease_granted")}
    given = [[gpu["memory_bytes"] for gpu in granted[str(client)]] for client in range(6)]
    assert [len(sizes) for sizes in given] == [1] * 6
    assert [sizes[0] >> 20 for sizes in given] == [size >> 20 for size in asked]
    # The workers' allocator had a cap below that, with room for CUDA's context.
    for event in events_of(done.folder, "worker_finished"):
        (gpu,) = event["gpus"]
        assert gpu["cap_bytes"] < gpu["lease_bytes"] == granted[event["client"]][0]["memory_bytes"]
        assert gpu["peak_bytes"] == gpu["lease_bytes"], "each of them has used all that it has leased"

    most = dict.fromkeys(host.uuids, 0)
    for holders in seen:
        for uuid in host.uuids:
            most[uuid] = max(most[uuid], sum(parts.get(uuid, 0) for parts in holders.values()))
    assert all(0 < leased <= BUDGET for leased in most.values()), most
    leases = {event["lease"] for event in events_of(done.folder, "lease_granted")}
    assert set().union(*seen) <= leases and len(leases) == 6
    assert max(len(holders) for holders in seen) >= 2, "they share"
    assert not host.holders()


def test_failing_clients_are_named_and_the_others_go_on(launch: Launch, tmp_path: Path) -> None:
    """One raises, one is killed, one takes too long; in the second round all of them are there again."""
    host = ModHost(tmp_path / "host", gpus=1)
    options = ("--clients", "4", "--rounds", "2", "--timeout-s", "15", "--run-config", 'what="fail"')
    done = launch(FOLDER / "leases_app", *options, env=launch_env(host))
    assert done.code == 0, done.output + done.logs()
    log = done.log("run")
    assert "Received 1 results and 3 failures" in log and "Received 4 results and 0 failures" in log
    assert "weights: [2.0, 2.0, 2.0, 2.0]" in log
    assert "train of client 1: ValueError: the data are gone" in log
    assert "train of client 2: the worker (pid " in log and "was killed by SIGKILL (9)" in log
    assert "these are the last words" in log
    assert "train of client 3: no result within timeout_s=15" in log
    # The state of the failed calls was not taken over: their next round is their first.
    assert f"round 2: state has counted {(2 + 1 + 1 + 1) / 4:.4f} rounds" in log

    assert {event["start_method"] for event in events_of(done.folder, "worker_started")} == {"fork"}
    finished = {event["client"]: event for event in reversed(events_of(done.folder, "worker_finished"))}
    outcomes = {client: event["outcome"] for client, event in finished.items()}
    assert outcomes == {"0": "ok", "1": "error", "2": "died", "3": "timeout"}
    # Flower by itself misses a process that has died when its heartbeat does not come, after 30 s and more.
    assert finished["2"]["seconds"] < 30
    assert not host.holders()


def test_a_client_process_that_is_killed_leaves_neither_worker_nor_lease(tmp_path: Path) -> None:
    """Nobody is there to report it: Flower notices it later. The run is stopped here before that."""
    host = ModHost(tmp_path / "host", gpus=1)
    command = [*COMMAND, str(FOLDER / "leases_app"), "--clients", "1", "--log-dir", str(tmp_path / "runs")]
    options = ["--run-config", 'what="kill the client"']
    launcher = subprocess.Popen(
        [*command, *options],
        env={**os.environ, **launch_env(host), "HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        [event] = until(
            lambda: [e for f in tmp_path.glob("runs/*") for e in events_of(f, "worker_started")],
            "a worker starts",
            timeout_s=120,
        )
        until(lambda: not (Path(f"/proc/{event['pid']}").exists() or host.holders()), "all of it is gone")
        assert launcher.poll() is None, "the run goes on"
        [folder] = tmp_path.glob("runs/*")
        assert events_of(folder, "worker_finished", "lease_released") == [], "nobody was left to say it"
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
    assert_nothing_left(folder)


def test_flowers_own_mods_outside_of_it(launch: Launch, tmp_path: Path) -> None:
    host = ModHost(tmp_path / "host", gpus=1)
    done = launch(FOLDER / "privacy_app", "--clients", "2", env=launch_env(host))
    assert done.code == 0, done.output + done.logs()
    # An update of norm 20 is clipped to 4 by one mod, to 2 by the next one.
    assert "norm: 2.000, noise: True" in done.log("run") and "in workers: 1.0" in done.log("run")
    for client in range(2):
        said = done.log(f"client-{client}")
        for words in (
            "Incoming message size: ",
            "Incoming `ArrayRecord` size statistics:",
            "Outgoing message size: ",
            "LocalDpMod: parameters are clipped by value: 4.0000.",
            "fixedclipping_mod: parameters are clipped by value: 2.0000.",
        ):
            assert words in said, words
    assert sorted(event["client"] for event in events_of(done.folder, "lease_granted")) == ["0", "1"]


def test_clients_without_the_mod_fail_alike_in_long_lived_processes(launch: Launch) -> None:
    """``GPUClient`` under ``start_client``, where Flower by itself would end the process."""
    options = ("--engine", "start-client", "--clients", "4", "--timeout-s", "20")
    done = launch(FOLDER / "failing_clients", *options)
    assert done.code == 0, done.output + done.logs()
    log = done.log("server")
    assert [entry["loss"] for entry in done.result["rounds"]] == [1.0]
    for words in (
        "received 1 results and 3 failures",
        "ValueError: the data are gone",
        "fit of client 2: the worker (pid ",
        "was killed by SIGKILL (9)",
        "fit of client 3: no result within timeout_s=20",
    ):
        assert words in log, words
    finished = {(one["client"], one["outcome"]) for one in events_of(done.folder, "worker_finished")}
    assert finished >= {("0", "ok"), ("1", "error"), ("2", "died"), ("3", "timeout")}
