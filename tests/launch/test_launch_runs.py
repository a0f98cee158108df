"""`flower-gpu launch` as a user starts it, with real Flower processes and an app without torch."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from file_tables import files_in, files_in_table
from launch_helpers import TINY_APP, LaunchRun
from live_processes import is_running
from run_programs import run, run_cli
from scripted_app import copy_of_app

from flower_gpu import trace
from flower_gpu.options import CPU_LEASES
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import RunClock, tries_of
from flower_gpu.watch.report.page import write_report
from flower_gpu.watch.report.totals import Totals

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., LaunchRun]
# The server uses Flower's FedAvg, and no part of the app imports flower_gpu.
ORDINARY = {"train": "add-one", "strategy": "fedavg", "elements": 1, "server-evaluates": False}
TOKEN = "hf_0f_this_run"


@pytest.fixture(scope="module")
def both_runs(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int, str, str]]:
    """Start two concurrent runs of an app that does not use flower_gpu.

    In the first run, one client fails to evaluate. The second run starts messages with Flower's own
    ``flwr-clientapp``, and all its clients fail to train.

    Returns
    -------
    list
        Run folder, exit status, stdout and stderr of each run.
    """
    options = (
        ["evaluate-fails-on='1'", "--tracker", "wandb", "--tracker=tensorboard"],
        ["train-fails-on='0 1'", "--no-fast-start", "-v"],
    )
    # At this level Flower logs each request of a SuperExec for a task.
    environment = {"WANDB_MODE": "offline", "FLWR_LOG_LEVEL": "DEBUG", "HF_TOKEN": TOKEN}
    app = copy_of_app(tmp_path_factory.mktemp("ordinary") / "app", **ORDINARY)
    started = [launch(app, "--run-config", *more, env=environment) for more in options]
    return [(run.folder, *ended) for run in started for ended in [run.finish()]]


@pytest.fixture
def ordinary_run(both_runs: list[tuple[Path, int, str, str]]) -> tuple[Path, str, str]:
    """Run folder, stdout and stderr of the first run."""
    folder, code, out, err = both_runs[0]
    assert code == 0, err
    return folder, out, err


def test_no_file_of_a_run_contains_a_token_of_the_environment(
    both_runs: list[tuple[Path, int, str, str]],
) -> None:
    """This holds for a completed run and a failed run, including their reports."""
    for folder, _, out, err in both_runs:
        write_report(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert any(path.name == "result.json" for path in files)
        assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
        assert TOKEN not in out + err


def test_trackers_get_the_metrics_of_the_trace(ordinary_run: tuple[Path, str, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, out, _ = ordinary_run
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    scalars = {
        tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]
    }
    assert scalars["evaluate/eval_acc"] == {1: 0.25, 2: 0.5}
    assert scalars["rounds/evaluate/failed"] == {1: 1, 2: 1}
    assert scalars["clients/train/train_loss/client 1"] == {1: 0.5, 2: 0.5}, "by client, not by node id"
    assert re.search(f"^tracker +tensorboard --logdir runs/{folder.name}/tensorboard$", out, re.M)
    # The supervisor ended all processes of the run, but waited until the process of W&B had sent everything.
    [sent] = folder.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", str(sent)]
    shown = run(command).stdout
    assert re.search(r"^  app +scripted$", shown, re.M), shown
    assert re.search(r"^  outcome +completed$", shown, re.M) and "finished (exit code 0)" in shown, shown


def test_the_output_for_an_ordinary_app_has_the_format_of_a_simulation(
    ordinary_run: tuple[Path, str, str],
) -> None:
    folder, out, err = ordinary_run
    # On a busy machine a round takes minutes, and further lines appear during the round.
    took = r"(\d+ min )?\S+ s"
    for number, accuracy in ((1, "0.25"), (2, "0.5")):
        assert re.search(rf"^round {number}/2  train +2/2 clients +{took}  train_loss 0.5$", out, re.M)
        line = rf"^round {number}/2  evaluate +2/2 clients +{took}  1 failed, eval_acc {accuracy}$"
        assert re.search(line, out, re.M), out
    assert re.search(r"^outcome +completed, 2 of 8 messages failed$", out, re.M)
    # The text of the error has a lone surrogate. It is escaped, so Flower can send the error at once instead
    # of waiting a minute for the reply.
    assert re.search(
        r"^  client 1, evaluate in rounds 1, 2 \(2 messages\): .*NameError.* in im\\udcffage", out, re.M
    )
    assert err.splitlines()[0] == "evaluate of client 1 failed in round 1:"
    assert err.count("Traceback (most recent call last)") == 1
    assert "scripted/client_app.py" in err and err.splitlines()[-1].startswith("NameError: name 'Nett'")
    assert "evaluate of client 1 failed in round 2: NameError: name 'Nett'" in out
    result = json.loads((folder / "result.json").read_text())
    assert [row["metrics"] for row in result["rounds"]] == [
        {"train": {"train_loss": 0.5}, "evaluate": {"eval_acc": accuracy}} for accuracy in (0.25, 0.5)
    ]
    assert (result["messages"], result["failed"]) == (8, 2)
    assert re.findall(r"(?m)^report +(.+)$", out) == [f"flower-gpu report runs/{folder.name}"]
    report = write_report(folder).read_text()
    assert "flower-gpu launch" in report and "completed, 2 of 8 messages failed" in report
    failures = (folder / "failures.log").read_text()
    assert failures.count("evaluate of client 1 failed in round") == 2


def test_the_tables_of_files_in_the_docs_match_a_run(ordinary_run: tuple[Path, str, str]) -> None:
    folder, *_ = ordinary_run
    files = files_in(folder)
    reference = files_in_table("reference/launch.md", "## The folder of a run")
    assert files <= reference
    # This run does not need a copy of the app. Another test may have written the report.
    assert reference - files - {"report.html"} == {"app/"}
    assert files_in_table("tutorial/first-federation.md") <= files


def test_a_launch_fails_if_all_clients_fail(both_runs: list[tuple[Path, int, str, str]]) -> None:
    """With Flower's own ``flwr-clientapp``, the traceback is only in the SuperNode's log."""
    folder, code, out, err = both_runs[1]
    assert code == 1
    assert re.match(r"flower-gpu \S+, Python \S+, \S+\n", err)  # -v
    assert "Sampled 2 nodes (out of 2)" in out  # -v
    assert err.count("Traceback (most recent call last)") == 1
    assert "client_app.py" in err and "NameError: name 'Nett' is not defined\n" in err
    assert "the clients of scripted have no leases and run in Flower's own processes (--no-fast-start)" in out
    sentence = "flower-gpu launch: all 2 clients failed in round 1; the first traceback is above"
    assert f"\n{sentence}; --keep-going lets such a run continue\n" in err
    *_, last = trace.read(folder / trace.FILE_NAME)
    assert (last["event"], last["outcome"]) == ("run_finished", "failed")
    assert json.loads((folder / "result.json").read_text())["failed"] == 2
    report = html.unescape(write_report(folder).read_text())
    assert 'train-fails-on = "0 1"' in report and f"flwr {version('flwr')}" in report


def test_logs_show_which_command_handled_the_messages(both_runs: list[tuple[Path, int, str, str]]) -> None:
    for folder, *_ in both_runs:
        logs = {path.name for path in folder.glob("*.log")} - {"failures.log", "flwr-list.log"}
        fast = json.loads((folder / "result.json").read_text())["settings"]["fast_start"]
        assert logs == {"client-0.log", "client-1.log", "run.log", "superlink.log"} | (
            {"programs.log", "warm-up.log"} if fast else set()
        )
        # Either a worker with a lease, or Flower's own command.
        program = "-c" if fast else r"/\S+/flwr-clientapp"
        assert re.search(f"started as {program}\n", (folder / "client-0.log").read_text())
        assert (folder / "flwr" / "config.toml").exists()


def test_superexecs_are_woken_instead_of_polling_for_tasks(ordinary_run: tuple[Path, str, str]) -> None:
    folder, *_ = ordinary_run
    for log, tasks in (("superlink", 1), ("client-0", 4), ("client-1", 4)):
        requests = (folder / f"{log}.log").read_text().count("Runtime.AcquireTask")
        # One more request comes at the start, and one per minute. Flower polls ten times a second.
        assert tasks <= requests <= tasks + 12, log


PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr")
print("the app parses", flush=True)
parser.parse_args()
"""


@pytest.fixture(scope="module")
def parsing_app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app whose ServerApp parses the command line when it is imported."""
    app = copy_of_app(tmp_path_factory.mktemp("parsing") / "app", **ORDINARY)
    server = app / "scripted" / "server_app.py"
    server.write_text(PARSES + server.read_text())
    return app


@pytest.fixture(scope="module")
def dying_runs(
    launch: Launch, parsing_app: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[LaunchRun, int, str, str]]:
    """Two concurrent runs with their exit status, stdout and stderr: a client is killed, a ServerApp exits.

    The first run has an ASCII locale, and the name of its app's folder is not ASCII.
    """
    app = copy_of_app(tmp_path_factory.mktemp("dying") / "\u00e9", **ORDINARY)
    dies = ["--run-config", "dies-on='0' num-server-rounds=1"]
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    started = {"client": launch(app, *dies, env=ascii_only), "server": launch(parsing_app)}
    return {name: (run, *run.finish()) for name, run in started.items()}


def test_a_killed_client_of_an_app_without_gpu_mod_loses_only_its_reply(
    dying_runs: dict[str, tuple[LaunchRun, int, str, str]],
) -> None:
    """The message runs in a worker, so Flower does not wait a minute for a missing heartbeat."""
    run, code, out, err = dying_runs["client"]
    assert code == 0, err
    events = list(trace.read(run.folder / trace.FILE_NAME))
    [reply] = [event for event in events if event["event"] == "reply" and event["error"]]
    assert reply["error"].startswith("train of client 0: the worker (pid ")
    assert "was killed by SIGKILL (9)" in reply["error"]
    assert sum(event["event"] == "worker_started" for event in events) == 4, "each message had a worker"
    [failure] = re.findall("^  client 0, train in round 1: (.*)", out, re.M)
    assert failure.startswith("the worker was killed by SIGKILL (9)")


def test_a_serverapp_that_exits_ends_its_run_with_its_output(
    dying_runs: dict[str, tuple[LaunchRun, int, str, str]], parsing_app: Path
) -> None:
    """Otherwise the run would end only after a minute without a heartbeat, and without a reason."""
    run, code, _, err = dying_runs["server"]
    assert code == 1
    sentence = r"the ServerApp exited: sys.exit\(2\) in server_app.py, line 6\. Its argparse has read the"
    assert re.match(f"flower-gpu launch: .*{sentence}", err), err
    assert "usage: flwr-serverapp [-h] [--lr LR]" in err and "the app parses" in err
    simulation = run_cli(
        "simulate", parsing_app, "--clients=2", "--log-dir", run.log_dir.parent / "simulated"
    )
    assert simulation.returncode == 2
    assert re.search(f"^flower-gpu simulate: {sentence}", simulation.stderr, re.M), simulation.stderr


@pytest.fixture(scope="module")
def failing_runs(launch: Launch) -> dict[str, LaunchRun]:
    """Concurrent runs that are killed, interrupted, or fail."""
    waits = "seconds=1000.0"
    configs = {"killed client": waits, "Ctrl-C": waits, "failed server": "fail='evaluate'"}
    # With leases of cores, the runs would wait for each other.
    environment = {CPU_LEASES.variable: "off"}
    return {
        name: launch(TINY_APP, "--clients=1", "--run-config", text, env=environment)
        for name, text in configs.items()
    }


def test_a_killed_supernode_ends_the_run_with_its_signal(failing_runs: dict[str, LaunchRun]) -> None:
    run = failing_runs["killed client"]
    run.wait_for_a_worker()
    pid = next(
        pid for pid in run.processes() if "flower-supernode" in Path(f"/proc/{pid}/cmdline").read_text()
    )
    os.kill(pid, signal.SIGKILL)
    code, _, err = run.finish()
    assert code == 1
    assert "ended with SIGKILL (-9)" in err.splitlines()[0]


def test_nothing_survives_ctrl_c(failing_runs: dict[str, LaunchRun]) -> None:
    run = failing_runs["Ctrl-C"]
    run.wait_for_a_worker()
    pids = run.processes()
    assert len(pids) >= 6
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130
    assert not any(map(is_running, pids))
    assert err.splitlines()[0] == "flower-gpu launch: stopping, SIGINT"
    assert "Traceback" not in err
    history = History.read(run.folder / "trace.jsonl")
    clock = RunClock.of(history)
    assert Totals(history, clock, tries_of(history, clock), {}).failures == {}
    result = json.loads((run.folder / "result.json").read_text())
    assert (history.rounds.highest_round, result["messages"], result["failed"]) == (0, 0, 0)


def test_superlink_reports_a_failed_server_app(failing_runs: dict[str, LaunchRun]) -> None:
    code, _, err = failing_runs["failed server"].finish()
    assert code == 1
    assert "Flower reports the run as finished:failed" in err.splitlines()[0]
    assert "RuntimeError: the evaluation fails on purpose" in err
    assert (
        json.loads((failing_runs["failed server"].folder / "result.json").read_text())["workers_started"] == 1
    )
