"""`flower-gpu launch` as a user starts it, with real Flower processes and an app without torch."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from file_tables import files_in, files_in_table
from launch_helpers import COMMAND, processes_of
from live_processes import is_running
from run_programs import run
from waiting import until

from flower_gpu import trace
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import RunClock, tries_of
from flower_gpu.watch.report.page import write_report
from flower_gpu.watch.report.totals import Totals

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., "subprocess.Popen[str]"]
TIMEOUT_S = 240
ROOT = Path(__file__).parents[2]
ORDINARY_APP = Path(__file__).parent / "ordinary_app"


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def only_run(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def wait_for_a_worker(tmp_path: Path) -> Path:
    """Wait until a client trains; return the run's folder."""

    def started() -> bool:
        return any(
            "worker_started" in file.read_text() for file in tmp_path.glob(f"runs/*/{trace.FILE_NAME}")
        )

    until(started, "a client trains", TIMEOUT_S)
    return only_run(tmp_path)


def given_to(log: Path) -> list[list[object]]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("given ")]
    return [json.loads(line.removeprefix("given ")) for line in lines]


def test_an_app_from_start_to_result(launch: Launch, tmp_path: Path, tiny_app: Path) -> None:
    code, out, err = finish(
        launch(
            tiny_app,
            "--clients=3",
            "--learning-rate=0.5",
            "--start-method=in-process",
            "--run-config",
            "text='a \"b\" = c'",
            "--node-config",
            "site='north pole'",
        )
    )
    assert (code, err) == (0, "")
    folder = only_run(tmp_path)
    assert out.splitlines()[0] == f"tiny: 3 clients, 2 rounds; logs in {folder.relative_to(tmp_path)}"
    # Of the same evaluation the app writes a line of its own into the trace, with the accuracy.
    assert re.search(
        r"^round 2/2  train +3/3 clients .+\nround 2/2  server-evaluate +loss 0.3333$", out, re.M
    )
    assert re.search(r"^server-evaluate +loss 0.3333, accuracy 0.6667$", out, re.M)
    result = json.loads((folder / "result.json").read_text())
    assert [row["round"] for row in result["rounds"]] == [1, 2]
    assert [row["loss"] for row in result["rounds"]] == [0.5, pytest.approx(1 / 3)]
    assert [(row["messages"], row["failed"]) for row in result["rounds"]] == [(3, 0), (3, 0)]
    assert result["initial"]["loss"] == 1.0
    workers = History.read(folder / "trace.jsonl").workers
    assert sorted(worker.client for worker in workers) == ["0", "0", "1", "1", "2", "2"]
    assert {worker.start_method for worker in workers} == {"in-process"}
    for client in range(3):
        log = folder / f"client-{client}.log"
        first, second = given_to(log)
        node_config, run_config, rounds = first
        assert node_config == {"partition-id": client, "num-partitions": 3, "site": "north pole"}
        assert run_config["learning-rate"] == 0.5
        assert run_config["num-clients"] == 3
        assert run_config["text"] == 'a "b" = c'
        assert (rounds, second[2]) == (1, 2), "the state of a client lasts from round to round"


@pytest.fixture(scope="module")
def both_runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int, str, str]]:
    """Run an app twice at once that knows nothing of flower_gpu.

    In the first run one client cannot evaluate. In the second one, whose messages start with Flower's own
    ``flwr-clientapp``, none can train.

    Returns
    -------
    list
        Of each run its folder, exit status, stdout, and stderr.
    """
    options = (
        ["evaluate-fails-on='1'", "--tracker", "wandb", "--tracker=tensorboard"],
        ["train-fails-on='0 1'", "--no-fast-start", "-v"],
    )
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "FLWR_LOG_LEVEL": "DEBUG",
    }  # then it logs each question of a SuperExec
    started = []
    for number, more in enumerate(options):
        log_dir = tmp_path_factory.mktemp(f"ordinary-{number}")
        process = subprocess.Popen(
            [*COMMAND, str(ORDINARY_APP), "--log-dir", str(log_dir), "--run-config", *more],
            env={name: value for name, value in environment.items() if name != "FLOWER_GPU_RUN_DIR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append((log_dir, process))
    ended = []
    for log_dir, process in started:
        code, out, err = finish(process)
        [folder] = log_dir.iterdir()
        ended.append((folder, code, out, err))
    return ended


@pytest.fixture
def ordinary_run(both_runs: list[tuple[Path, int, str, str]]) -> tuple[Path, str, str]:
    """The first one's folder, stdout, and stderr."""
    folder, code, out, err = both_runs[0]
    assert code == 0, err
    return folder, out, err


def test_trackers_get_what_the_trace_tells(ordinary_run: tuple[Path, str, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, out, _ = ordinary_run
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    found = {tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}
    assert found["evaluate/eval_acc"] == {1: 0.25, 2: 0.5}
    assert found["rounds/evaluate/failed"] == {1: 1, 2: 1}
    assert found["clients/train/train_loss/client 1"] == {1: 0.5, 2: 0.5}, "by clients, not by Flower's ids"
    assert re.search(f"^tracker +tensorboard --logdir {folder / 'tensorboard'}$", out, re.M)
    # The supervisor has ended all processes of the run, and left the one of W&B until all was sent.
    [sent] = folder.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", str(sent)]
    shown = run(command).stdout
    assert re.search(r"^  app +ordinary$", shown, re.M), shown
    assert re.search(r"^  outcome +completed$", shown, re.M) and "finished (exit code 0)" in shown, shown


def test_an_ordinary_app_is_shown_as_a_simulation_is(ordinary_run: tuple[Path, str, str]) -> None:
    folder, out, err = ordinary_run
    took = r"(\d+ min )?\S+ s"  # on a busy machine a round takes minutes, and there are lines within it
    for number, accuracy in ((1, "0.25"), (2, "0.5")):
        assert re.search(rf"^round {number}/2  train +2/2 clients +{took}  train_loss 0.5$", out, re.M)
        told = rf"^round {number}/2  evaluate +2/2 clients +{took}  1 failed, eval_acc {accuracy}$"
        assert re.search(told, out, re.M), out
    assert re.search(r"^outcome +completed, 2 of 8 messages failed$", out, re.M)
    assert re.search(r"^  client 1, evaluate in rounds 1, 2 \(2 messages\): .*NameError", out, re.M)
    assert err.splitlines()[0] == "evaluate of client 1 failed in round 1:"
    assert err.count("Traceback (most recent call last)") == 1
    assert "ordinary/client_app.py" in err and err.splitlines()[-1].startswith("NameError: name 'Nett'")
    assert "evaluate of client 1 failed in round 2: NameError: name 'Nett'" in out
    result = json.loads((folder / "result.json").read_text())
    assert [row["metrics"] for row in result["rounds"]] == [
        {"train": {"train_loss": 0.5}, "evaluate": {"eval_acc": accuracy}} for accuracy in (0.25, 0.5)
    ]
    assert (result["messages"], result["failed"]) == (8, 2)
    assert re.findall(r"(?m)^report +(.+)$", out) == [f"flower-gpu report {folder}"]
    report = write_report(folder).read_text()
    assert "flower-gpu launch" in report and "completed, 2 of 8 messages failed" in report
    failures = (folder / "failures.log").read_text()
    assert failures.count("evaluate of client 1 failed in round") == 2


def test_tables_of_files_are_true(ordinary_run: tuple[Path, str, str]) -> None:
    folder, *_ = ordinary_run
    there = files_in(folder)
    reference = files_in_table("reference/launch.md", "## The folder of a run")
    assert there <= reference
    # What this run has no reason for. Another test may have written its report.
    assert reference - there - {"report.html"} == {"app/", "model.safetensors"}
    assert files_in_table("tutorial/first-federation.md") - there == {"model.safetensors"}


def test_all_clients_fail(both_runs: list[tuple[Path, int, str, str]]) -> None:
    """With Flower's own ``flwr-clientapp`` the traceback is in the SuperNode's log."""
    folder, code, out, err = both_runs[1]
    assert code == 1
    assert re.match(r"flower-gpu \S+, Python \S+, \S+\n", err)  # -v
    assert "Sampled 2 nodes (out of 2)" in out  # -v
    assert err.count("Traceback (most recent call last)") == 1
    assert "client_app.py" in err and "NameError: name 'Nett' is not defined\n" in err
    sentence = "flower-gpu launch: all 2 clients failed in round 1; the first traceback is above"
    assert f"\n{sentence}; --keep-going lets such a run go on\n" in err
    *_, last = trace.read(folder / trace.FILE_NAME)
    assert (last["event"], last["outcome"]) == ("run_finished", "failed")
    assert json.loads((folder / "result.json").read_text())["failed"] == 2
    report = html.unescape(write_report(folder).read_text())
    assert 'train-fails-on = "0 1"' in report and f"flwr {version('flwr')}" in report


def test_logs_and_commands_of_both(both_runs: list[tuple[Path, int, str, str]]) -> None:
    for folder, *_ in both_runs:
        logs = {path.name for path in folder.glob("*.log")} - {"failures.log", "flwr-list.log"}
        fast = json.loads((folder / "result.json").read_text())["settings"]["fast_start"]
        assert logs == {"client-0.log", "client-1.log", "run.log", "superlink.log"} | (
            {"programs.log", "warm-up.log"} if fast else set()
        )
        program = "" if fast else r"/\S+/"  # Flower's own is found by its entry point
        assert re.search(rf"started as {program}flwr-clientapp\n", (folder / "client-0.log").read_text())
        assert (folder / "flwr" / "config.toml").exists()


def test_superexecs_are_woken_and_ask_for_nothing_in_vain(ordinary_run: tuple[Path, str, str]) -> None:
    folder, *_ = ordinary_run
    for log, tasks in (("superlink", 1), ("client-0", 4), ("client-1", 4)):
        questions = (folder / f"{log}.log").read_text().count("Runtime.AcquireTask")
        # One more at the start, and one in a minute; Flower's asks ten times in a second.
        assert tasks <= questions <= tasks + 12, log


def test_a_killed_client_is_named(launch: Launch, tmp_path: Path, tiny_app: Path) -> None:
    process = launch(tiny_app, "--clients=1", "--run-config", "seconds=100.0")
    folder = wait_for_a_worker(tmp_path)
    pid = next(
        pid for pid in processes_of(folder) if "flower-supernode" in Path(f"/proc/{pid}/cmdline").read_text()
    )
    os.kill(pid, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert "ended with SIGKILL (-9)" in err.splitlines()[0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_survives_the_launcher(signum: int, launch: Launch, tmp_path: Path, tiny_app: Path) -> None:
    process = launch(tiny_app, "--clients=1", "--run-config", "seconds=100.0")
    folder = wait_for_a_worker(tmp_path)
    pids = processes_of(folder)
    assert len(pids) >= 6
    process.send_signal(signum)
    code, _, err = finish(process)
    if signum == signal.SIGINT:
        assert code == 130
        assert not any(map(is_running, pids))
        assert err.splitlines()[0] == "flower-gpu launch: stopping, SIGINT"
        history = History.read(folder / "trace.jsonl")
        clock = RunClock.of(history)
        assert Totals(history, clock, tries_of(history, clock), {}).failures == {}
        result = json.loads((folder / "result.json").read_text())
        assert (history.highest_round, result["messages"], result["failed"]) == (0, 0, 0)
        assert "Traceback" not in err
    else:
        until(lambda: not any(map(is_running, pids)), "all are gone")


def test_superlink_reports_a_failed_server_app(launch: Launch, tmp_path: Path, tiny_app: Path) -> None:
    options = ("--clients=1", "--run-config", "fail='evaluate'")
    code, _, err = finish(launch(tiny_app, *options))
    assert code == 1
    assert "Flower reports the run as finished:failed" in err.splitlines()[0]
    assert "RuntimeError: the evaluation fails on purpose" in err
    assert json.loads((only_run(tmp_path) / "result.json").read_text())["workers_started"] == 1
