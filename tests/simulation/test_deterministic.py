"""``--deterministic``: the same seed gives the same model with any workers, or an error explains why not."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from scripted_app import variant
from simulations import Simulation, run, running, wait_for_line

from flower_gpu import simulate
from flower_gpu.errors import ConfigError
from flower_gpu.simulation import determinism

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("torch")

NODES = 5
OPTIONS = ("--seed", "3", "--deterministic")


def model_of(done: Simulation) -> str:
    """Return the SHA-256 of a run's model, as its last lines show it."""
    assert done.status == 0, done.output
    (digest,) = re.findall(r"^model sha256 +([0-9a-f]{64})$", done.output, re.MULTILINE)
    assert done.summary["model_sha256"] == digest and done.summary["failed"] == 0
    return digest


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """A run with a single worker at a time, and a new worker for each message."""
    options = (*OPTIONS, "--max-workers", "1", "--calls-per-worker", "1")
    return run("exact", NODES, tmp_path_factory.mktemp("alone"), *options)


def test_the_summary_has_the_start_time_of_new_workers(alone: Simulation) -> None:
    """This app has no optimizer. Otherwise the summary would measure until its first step."""
    assert alone.status == 0, alone.output
    summary = alone.summary
    assert summary["worker_ready_s"] > 0 and summary["worker_ready"] == "until the app's function begins"
    assert re.search(
        r"^workers .*; each took .+ until the app's function begins \(median\)$", alone.output, re.M
    )


def test_a_killed_client_and_a_killed_run_do_not_change_the_model(alone: Simulation, tmp_path: Path) -> None:
    """The run starts with two reused workers, and continues with many new ones."""
    runs, rounds, killed = tmp_path / "runs", tmp_path / "rounds", tmp_path / "killed"
    rounds.mkdir()
    # The third round waits for its file.
    for number in ("1", "2"):
        (rounds / number).touch()
    options = ("--max-workers", "2", "--calls-per-worker", "1000", *OPTIONS)
    config = f"waits-for='{rounds}' dies-once='{killed}'"
    with running("exact", NODES, runs, *options, "--run-config", config) as process:
        wait_for_line(process, "round 2/3")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    (folder,) = runs.iterdir()
    first = Simulation(-signal.SIGKILL, "", folder).calls
    assert max(Counter(call["pid"] for call in first).values()) > 1, "workers are used again"
    shutil.rmtree(folder / "states", ignore_errors=True)
    (rounds / "3").touch()
    done = run("exact", NODES, runs, "--max-workers", "8", "--resume", str(folder))
    assert "Continuing after round" in done.output
    assert model_of(done) == model_of(alone)
    assert killed.exists() and [call["outcome"] for call in done.calls].count("died") == 1
    assert not done.summary["recycling"]["is_used_again"] and {call["threads"] for call in done.calls} == {1}


def test_another_number_of_threads_may_give_another_model(alone: Simulation, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "2")
        done = run("exact", NODES, tmp_path, *OPTIONS)
        assert {call["threads"] for call in done.calls} == {2}
        again = run("exact", NODES, tmp_path, "--resume", str(alone.folder))
    assert model_of(done) != model_of(alone), "the app's bits depend on the threads"
    assert again.status == 2 and "threads was 1 and is 2" in again.output
    assert "or start a new run without --resume" in again.output and "resumable()" not in again.output


def test_a_run_that_is_resumed_on_another_machine_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    here = determinism.described([])
    determinism.check_same(here, here, is_strict=True)
    # The earlier run recorded no properties of its machine.
    determinism.check_same({"seed": 1}, here, is_strict=True)
    earlier = {**here, "cpu": "Z80", "versions": {**here["versions"], "numpy": "1.0"}}
    with pytest.raises(ConfigError, match=r"cpu was Z80 and is .+; versions was .*numpy 1\.0.* and is "):
        determinism.check_same(earlier, here, is_strict=True)
    determinism.check_same(earlier, here, is_strict=False)
    assert "The model may differ" in caplog.text


def test_an_operation_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    done = run("exact", NODES, tmp_path, *OPTIONS, "--run-config", "operation='put'")
    assert done.status == 1
    lines = done.output.splitlines()
    (last,) = {line for line in lines if line.startswith("flower-gpu simulate: train of client ")}
    assert "PyTorch's put_ has no deterministic implementation" in last
    assert done.summary["outcome"] == "failed" and "NotDeterministicError" in done.summary["error"]


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="this one has fixed hashes")
def test_python_with_random_hashes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0 from the start of Python"):
        simulate(variant("exact"), 2, deterministic=True, log_dir=tmp_path / "runs")
    assert not list(tmp_path.iterdir())


def test_an_interpreter_that_ignores_the_variable_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-E", "-m", "flower_gpu.cli", "simulate", str(variant("exact"))]
    done = subprocess.run(
        [*command, "--num-supernodes", "2", "--deterministic", "--log-dir", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=120,
        # With -E this test would start another fork server.
        env={**os.environ, "FLOWER_GPU_START_METHOD": "spawn"},
    )
    assert done.returncode == 2 and "PYTHONHASHSEED=0" in done.stderr
