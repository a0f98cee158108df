"""Whole federations: real processes and real data, on a host with stub GPUs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launched import (
    QUICKSTART,
    REPOSITORY,
    Launch,
    Launched,
    assert_nothing_left,
    events_of,
    most_at_a_time,
)
from nvml_stub import GIB, Host

from flower_gpu.leases.admission import SHARED_PART
from flower_gpu.options import RESERVE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUMPY_APP = Path(__file__).parent / "numpy_app"
DEVICE_POLICY = REPOSITORY / "examples" / "device-policy"


def assert_each_call_has_its_process(done: Launched, clients: str) -> None:
    """Check that the quickstart has learned, each call had its own process, and no client has evaluated."""
    entries, workers = done.result["rounds"], done.workers
    assert [entry["round"] for entry in entries] == [1]
    assert entries[-1]["accuracy"] > 0.7 and entries[-1]["loss"] < done.result["initial"]["loss"]
    assert all(entry["seconds"] > 0 for entry in entries)
    pids = [worker.pid for worker in workers]
    assert len(set(pids)) == len(pids)
    fits = [worker for worker in workers if worker.task == "fit"]
    assert sorted(worker.client for worker in fits) == [*clients]
    assert {worker.start_method for worker in fits} == {"forkserver"}
    evaluations = [worker for worker in workers if worker.task == "evaluate"]
    assert [worker.client for worker in evaluations] == ["server"] * 2

    from safetensors.torch import load_file

    state = load_file(done.folder / "model.safetensors", device="cpu")
    assert sum(tensor.numel() for tensor in state.values()) > 10_000


def test_the_quickstart_with_three_supernodes_on_a_gpu_with_room_for_two(
    launch: Launch, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", gpus=1)
    with host.observed() as seen:
        done = launch(
            QUICKSTART,
            *("--clients", "3", "--gpu-memory", "7GiB", "--rounds", "1", "--local-epochs", "6"),
            command=[str(REPOSITORY / "run.sh")],
            env={**host.env, "FLOWER_GPU_VENV": sys.prefix},
        )
    assert done.code == 0, done.output + done.logs()
    assert_each_call_has_its_process(done, "012")
    assert "GPU 0 (NVIDIA Stub 16GB) has room for 2 at a time" in done.output

    leased = [event for event in done.events("worker_started", "worker_finished") if "lease" in event]
    assert most_at_a_time(leased) == 2, "twice 7 GiB and the reserve fit into 16 GiB"
    assert max(sum(sum(gpus.values()) for gpus in look.values()) for look in seen) <= 14 * GIB
    granted, released = done.events("lease_granted"), done.events("lease_released")
    assert {event["lease"] for event in granted} == {event["lease"] for event in released}
    assert set().union(*seen) <= {event["lease"] for event in granted}, "every lease is in the trace"
    assert {event["gpus"][0]["memory_bytes"] for event in granted} == {7 * GIB}
    assert sorted(event["client"] for event in granted) == [*"012", "server", "server"]
    assert not host.status().holders

    on_gpus = {event["lease"] for event in granted}
    without = [event.task for event in done.workers if event.lease not in on_gpus]
    assert without == ["quickstart.task:initial_weights"]
    assert done.result["leases"]["count"] == 5
    waited_s = sum(event["waited_s"] for event in granted)
    assert done.result["leases"]["waited_s"] == pytest.approx(waited_s, abs=0.01)
    assert re.search("^leases +5, waited for", done.output, re.MULTILINE)


def test_failing_clients_and_distributed_gpus(launch: Launch, tmp_path: Path) -> None:
    """The app does not pass its context on, so its processes know the policy from their environment."""
    host = Host(tmp_path / "host", gpus=2)
    dealt_out = ("--gpu", "force", "--gpu-ids", "1,0", "--gpu-memory", "3GiB")
    done = launch(NUMPY_APP, "--clients", "4", "--rounds", "2", *dealt_out, env=host.env)
    assert done.code == 0, done.output + done.logs()
    assert done.result["rounds"][-1]["loss"] < done.result["initial"]["loss"] / 10
    assert done.result["rounds"][1]["accuracy"] == 1.0
    for words in ("fit of client 1: the worker", "killed by SIGKILL (9)", "this client dies now"):
        assert words in done.log("client-1")
    assert len([worker for worker in done.workers if worker.task == "fit"]) == 8
    leased = done.leased()
    assert leased.pop("server") <= {0, 1}
    assert leased == {"0": {1}, "1": {0}, "2": {1}, "3": {0}}

    assert done.log("run").count("received 1 results and 3 failures") == 2
    failures = done.log("failures")
    for words in ("the data are gone", "was killed by SIGKILL", "no result within timeout_s=5"):
        assert words in failures, words
    outcomes = {event["client"]: event["outcome"] for event in done.events("worker_finished")}
    of_clients = {"0": "ok", "1": "died", "2": "error", "3": "timeout"}
    assert outcomes == {**of_clients, "server": "ok"}


@pytest.mark.timeout(600)
def test_the_example_with_four_nodes_and_four_policies(tmp_path: Path) -> None:
    """The example runs unchanged, with its SuperLink, its SuperNodes and its two runs."""
    host = Host(tmp_path / "host", gpus=1)
    logs = tmp_path / "logs"
    done = subprocess.run(
        [DEVICE_POLICY / "federation.sh", logs],
        env={
            **os.environ,
            **host.env,
            "PORT": str(five_free_ports()),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )
    readable = "\n".join(path.read_text() for path in logs.glob("*.log"))
    assert done.returncode == 0, done.stdout + readable
    readme = (DEVICE_POLICY / "README.md").read_text()
    shown = [line.strip() for line in readme.splitlines() if line.startswith("    | ")]
    assert [line for line in done.stdout.splitlines() if line.startswith("| ")] == shown
    node_output = done.stdout.partition("what the nodes were told:\n")[2]
    assert "no-gpu: this call runs on the CPU although the server requests a GPU" in node_output
    assert "keeps-it: this call runs on the CPU although the server requests a GPU" in node_output
    assert "forces-it: this node's policy is force: a GPU is used although the server does not" in node_output
    assert "offers-it" not in node_output
    assert len(events_of(logs, "worker_started")) == 8
    granted = events_of(logs, "lease_granted")
    assert len(granted) == 3, "two nodes in the run with use-gpu=true, one of them in the other run"
    sizes = sorted(event["gpus"][0]["memory_bytes"] for event in granted)
    quarter = int(int((16 * GIB - RESERVE.resolve()) * SHARED_PART) * 0.25)
    assert sizes == [2 * GIB, quarter, quarter], "each node's own size applies, not the app's request"
    assert_nothing_left(logs)


def five_free_ports() -> int:
    """Return the first of five consecutive free ports."""
    # Tests of another clone may look for ports at the same time.
    begin = 5 * (os.getpid() % 2000)
    for first in (*range(21000 + begin, 32000, 5), *range(21000, 21000 + begin, 5)):
        sockets = [socket.socket() for _ in range(5)]
        try:
            for number, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        else:
            return first
        finally:
            for probe in sockets:
                probe.close()
    raise AssertionError("no five free ports")
