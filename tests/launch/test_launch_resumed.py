"""A run of `flower-gpu launch` can be resumed after its processes were killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from how_to_pages import commands
from launch_helpers import TIMEOUT_S, LaunchRun, plan_of, processes_of
from live_processes import processes_with
from run_programs import run
from scripted_app import APP
from waiting import until

from flower_gpu import trace
from flower_gpu.apps.folder import in_use
from flower_gpu.errors import ConfigError
from flower_gpu.launch import run as launch_run

pytestmark = pytest.mark.timeout(900)  # three launches, one after the other


# The updates of clients depend on partition, round and model, and the server samples two of three clients.
CONFIG = (
    "train='walk' weights='two' num-server-rounds=4 server-evaluates=false "
    "fraction-train=0.67 min-nodes=3 sampling-seed=7"
)


def kill(name: str, folder: Path) -> None:
    """Kill the processes of a run with this name."""
    pids = [pid for pid, command in processes_with("FLOWER_GPU_RUN_DIR", folder).items() if name in command]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def wait_for_round(started: LaunchRun, server_round: int) -> None:
    """Wait until a round begins. By then the checkpoint of the previous round is written."""

    def has_begun() -> bool:
        for path in started.log_dir.glob(f"*/{trace.FILE_NAME}"):
            rounds = [event["round"] for event in trace.read(path) if event["event"] == "round_started"]
            return bool(rounds) and rounds[-1] == server_round
        return False

    until(has_begun, f"round {server_round} begins", TIMEOUT_S)


@pytest.fixture(scope="module")
def resumed(
    launch: Callable[..., LaunchRun], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """The folder of a run that was killed twice, its model file, and stderr after the first kill."""
    model = tmp_path_factory.mktemp("model") / "launched.json"
    start_command, resume_command = (line.split() for line in commands("resume.md"))
    assert start_command[:-1] == ["flower-gpu", "launch", "my-app", "--clients"]
    assert resume_command == [*start_command[:3], "--resume", "runs/<time>"]
    config = f"{CONFIG} model='{model}' seconds=3.0"
    options = ("--run-config", config, "--node-config", "kept=1")
    first = launch(APP, "--clients", "3", *options)
    wait_for_round(first, 3)
    kill("flower-superlink", first.folder)
    code, _, first_stderr = first.finish()
    assert code == 1, first_stderr
    second = launch(APP, resume=first.folder)
    wait_for_round(second, 4)
    kill("flwr-serverapp", first.folder)
    # Flower would notice the missing ServerApp only after a minute.
    second.process.kill()
    second.process.communicate()
    until(lambda: not processes_of(first.log_dir), "nothing of the run is left")
    code, out, err = launch(APP, "--run-config", "seconds=0.0", resume=first.folder).finish()
    assert code == 0, out + err
    assert "resumed after round 3" in out
    return first.folder, model, first_stderr


def test_a_run_killed_twice_ends_with_the_same_bits_as_an_undisturbed_run(
    resumed: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """The undisturbed run is a simulation. Both engines sum the replies in the order of partitions."""
    model = tmp_path / "simulated.json"
    config = f"{CONFIG} model='{model}'"
    simulate = [sys.executable, "-m", "flower_gpu.cli", "simulate", str(APP), "--clients", "3"]
    done = run([*simulate, "--run-config", config, "--log-dir", str(tmp_path / "runs")])
    assert done.returncode == 0, done.stderr
    assert resumed[1].read_text() == model.read_text()


def test_the_folder_of_a_resumed_run_describes_a_single_run(resumed: tuple[Path, Path, str]) -> None:
    folder, _, first_stderr = resumed
    result = json.loads((folder / "result.json").read_text())
    assert (result["outcome"], result["resumed_after_round"]) == ("completed", 3)
    assert [row["round"] for row in result["rounds"]] == [1, 2, 3, 4]
    assert (result["messages"], result["failed"]) == (8, 0)
    assert [config["kept"] for config in result["settings"]["node_configs"]] == [1, 1, 1]
    # Each start is a new run for Flower, and the state of a client lasts for a single run of Flower.
    calls = [row["metrics"]["train"]["calls"] for row in result["rounds"]]
    assert calls[2:] == [1, 1] and calls[0] == 1 < calls[1]
    assert f"add this to the same command: --resume runs/{folder.name}" in first_stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--clients", "4"], "--clients 4: the run in .* has 3, and continues with them"),
        (["--rounds", "3"], "nothing is left to do: the run has finished 4 rounds, and is asked for 3"),
        (["--resume", "nowhere"], "--resume nowhere: there is no such folder"),
        (["--resume", str(APP)], "it has no trace.jsonl of `flower-gpu launch`"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_refused(
    options: list[str], words: str, resumed: tuple[Path, Path, str]
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(APP, "--resume", str(resumed[0]), *options)


def test_options_that_are_not_given_come_from_the_resumed_run(
    resumed: tuple[Path, Path, str], tmp_path: Path
) -> None:
    resume = ["--resume", str(resumed[0])]
    new_plan = plan_of(APP, *resume, "--run-config", "num-server-rounds=6", "--node-config", "new=2")
    assert (new_plan.clients, new_plan.num_rounds, new_plan.run_config["strategy"]) == (3, 6, "ours")
    assert new_plan.node_config_of(1) == {"partition-id": 1, "num-partitions": 3, "kept": 1, "new": 2}
    damaged = Path(shutil.copytree(resumed[0], tmp_path / "damaged"))
    next((damaged / "checkpoint").glob("*.model")).write_bytes(b"short")
    with pytest.raises(ConfigError, match="model is damaged"):
        plan_of(APP, "--resume", str(damaged))


def test_a_run_that_another_process_has_resumed_is_left_alone(resumed: tuple[Path, Path, str]) -> None:
    environment = {**os.environ, "FLOWER_GPU_RUN_DIR": str(resumed[0])}
    with (
        in_use(resumed[0] / trace.FILE_NAME),
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as other,
    ):
        with pytest.raises(ConfigError, match="another process continues the run in"):
            launch_run.launch(plan_of(APP, "--resume", str(resumed[0])).options)
        assert other.poll() is None
        other.communicate(b"\n")
