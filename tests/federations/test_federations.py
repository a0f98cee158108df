"""Whole federations: both engines, both of Flower's interfaces, real processes and real data."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launched import QUICKSTART, Launch, launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

APPS = Path(__file__).parent


@pytest.mark.parametrize("engine", ["superlink", "start-client"])
def test_quickstart_trains_in_processes_of_their_own(engine: str, launch: Launch, tmp_path: Path) -> None:
    done = launch(QUICKSTART, "--engine", engine, "--clients", "2", "--rounds", "2")
    assert done.code == 0, done.output + done.logs()
    rounds, workers = done.result["rounds"], done.result["workers"]
    assert [entry["round"] for entry in rounds] == [1, 2]
    assert rounds[-1]["accuracy"] > 0.7 and rounds[-1]["loss"] < rounds[0]["loss"]
    assert all(0 <= entry[key] <= 1 for entry in rounds for key in ("precision", "recall", "f1"))
    assert all(entry["seconds"] > 0 for entry in rounds)

    pids = [worker["pid"] for worker in workers]
    assert len(set(pids)) == len(pids), "each call has a process of its own"
    fits = [worker for worker in workers if worker["task"] == "fit"]
    assert sorted(worker["client"] for worker in fits) == ["0", "0", "1", "1"]
    assert {worker["start_method"] for worker in fits} == {"fork" if engine == "superlink" else "forkserver"}
    evaluations = [worker for worker in workers if worker["task"] == "evaluate"]
    assert [worker["client"] for worker in evaluations] == ["server"] * 3, "clients do not evaluate"

    if engine == "start-client":
        for client in range(2):
            assert "torch imported: no" in done.log(f"client-{client}")

    from safetensors.torch import load_file

    state = load_file(done.folder / "model.safetensors", device="cpu")
    assert sum(tensor.numel() for tensor in state.values()) > 10_000
    assert not (tmp_path / ".flwr").exists(), "the user's own Flower configuration is not touched"


def test_message_api(launch: Launch) -> None:
    done = launch(APPS / "message_app", "--clients", "2")
    assert done.code == 0, done.output + done.logs()
    assert [entry["loss"] for entry in done.result["rounds"]] == [1.0, 2.0]
    assert "steps: 2 int64; evaluated by clients: 0" in done.log("run")


def test_two_runs_side_by_side_with_dying_workers(tmp_path: Path) -> None:
    """One with each engine, one of them on a port that is free again afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = [tmp_path / "superlink", tmp_path / "start-client"]
    for folder in folders:
        folder.mkdir()
    options = ("--clients", "3", "--run-config", "dying-client=1")
    with ThreadPoolExecutor() as threads:
        beside = threads.submit(launcher(folders[0]), APPS / "numpy_app", "--engine", "superlink", *options)
        port_option = ("--port", str(port))
        here = launcher(folders[1])(APPS / "numpy_app", "--engine", "start-client", *options, *port_option)
    for done in (beside.result(), here):
        assert done.code == 0, done.output + done.logs()
        assert len(done.result["rounds"]) == 2
        assert done.result["rounds"][-1]["accuracy"] == 1.0
        assert len([worker for worker in done.result["workers"] if worker["task"] == "fit"]) == 6
        assert "fit of client 1: the worker" in done.log("client-1")
        assert "killed by SIGKILL (9)" in done.log("client-1")
        assert "this client dies now" in done.log("client-1")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
