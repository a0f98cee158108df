"""`flower-gpu launch` as a user starts it, with real Flower processes and an app without torch."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
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

from flower_gpu import trace
from flower_gpu.options import CPU_LEASES
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import RunClock, tries_of
from flower_gpu.watch.report.page import write_report
from flower_gpu.watch.report.totals import Totals

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., LaunchRun]
ORDINARY_APP = Path(__file__).parent / "ordinary_app"
TOKEN = "hf_0f_this_run"


@pytest.fixture(scope="module")
def both_runs(launch: Launch) -> list[tuple[Path, int, str, str]]:
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
    # At this level Flower logs each question of a SuperExec.
    environment = {"WANDB_MODE": "offline", "FLWR_LOG_LEVEL": "DEBUG", "HF_TOKEN": TOKEN}
    started = [launch(ORDINARY_APP, "--run-config", *more, env=environment) for more in options]
    return [(one.folder, *ended) for one in started for ended in [one.finish()]]


@pytest.fixture
def ordinary_run(both_runs: list[tuple[Path, int, str, str]]) -> tuple[Path, str, str]:
    """The first one's folder, stdout, and stderr."""
    folder, code, out, err = both_runs[0]
    assert code == 0, err
    return folder, out, err


def test_no_file_of_a_run_has_a_token_of_the_environment(
    both_runs: list[tuple[Path, int, str, str]],
) -> None:
    """Neither of a run that completed nor of one that failed, with its report."""
    for folder, _, out, err in both_runs:
        write_report(folder)
        found = [path for path in folder.rglob("*") if path.is_file()]
        assert any(path.name == "result.json" for path in found)
        assert [path for path in found if TOKEN.encode() in path.read_bytes()] == []
        assert TOKEN not in out + err


def test_trackers_get_what_the_trace_tells(ordinary_run: tuple[Path, str, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, out, _ = ordinary_run
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    found = {tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}
    assert found["evaluate/eval_acc"] == {1: 0.25, 2: 0.5}
    assert found["rounds/evaluate/failed"] == {1: 1, 2: 1}
    assert found["clients/train/train_loss/client 1"] == {1: 0.5, 2: 0.5}, "by clients, not by Flower's ids"
    assert re.search(f"^tracker +tensorboard --logdir runs/{folder.name}/tensorboard$", out, re.M)
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
    # Its text has a lone surrogate: Flower can send the error, so nobody waits a minute for the reply.
    assert re.search(
        r"^  client 1, evaluate in rounds 1, 2 \(2 messages\): .*NameError.* in im\\udcffage", out, re.M
    )
    assert err.splitlines()[0] == "evaluate of client 1 failed in round 1:"
    assert err.count("Traceback (most recent call last)") == 1
    assert "ordinary/client_app.py" in err and err.splitlines()[-1].startswith("NameError: name 'Nett'")
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


def test_tables_of_files_are_true(ordinary_run: tuple[Path, str, str]) -> None:
    folder, *_ = ordinary_run
    there = files_in(folder)
    reference = files_in_table("reference/launch.md", "## The folder of a run")
    assert there <= reference
    # What this run has no reason for. Another test may have written its report.
    assert reference - there - {"report.html"} == {"app/"}
    assert files_in_table("tutorial/first-federation.md") <= there


def test_all_clients_fail(both_runs: list[tuple[Path, int, str, str]]) -> None:
    """With Flower's own ``flwr-clientapp`` the traceback is in the SuperNode's log."""
    folder, code, out, err = both_runs[1]
    assert code == 1
    assert re.match(r"flower-gpu \S+, Python \S+, \S+\n", err)  # -v
    assert "Sampled 2 nodes (out of 2)" in out  # -v
    assert err.count("Traceback (most recent call last)") == 1
    assert "client_app.py" in err and "NameError: name 'Nett' is not defined\n" in err
    assert "the clients of ordinary have no leases and run in Flower's own processes (--no-fast-start)" in out
    sentence = "flower-gpu launch: all 2 clients failed in round 1; the first traceback is above"
    assert f"\n{sentence}; --keep-going lets such a run continue\n" in err
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
        # A worker with a lease, or Flower's own command, which is found by its entry point.
        program = "-c" if fast else r"/\S+/flwr-clientapp"
        assert re.search(f"started as {program}\n", (folder / "client-0.log").read_text())
        assert (folder / "flwr" / "config.toml").exists()


def test_superexecs_are_woken_and_ask_for_nothing_in_vain(ordinary_run: tuple[Path, str, str]) -> None:
    folder, *_ = ordinary_run
    for log, tasks in (("superlink", 1), ("client-0", 4), ("client-1", 4)):
        questions = (folder / f"{log}.log").read_text().count("Runtime.AcquireTask")
        # One more at the start, and one in a minute; Flower's asks ten times in a second.
        assert tasks <= questions <= tasks + 12, log


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
    app = Path(shutil.copytree(ORDINARY_APP, tmp_path_factory.mktemp("parsing") / "app"))
    server = app / "ordinary" / "server_app.py"
    server.write_text(PARSES + server.read_text())
    return app


@pytest.fixture(scope="module")
def lost(
    launch: Launch, parsing_app: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[LaunchRun, int, str, str]]:
    """Run, at once, an app of which a client is killed, and one whose ServerApp exits; with their ends.

    The first run is in a locale of ASCII, its app in a folder whose name is not ASCII.
    """
    app = shutil.copytree(ORDINARY_APP, tmp_path_factory.mktemp("dying") / "\u00e9")
    dies = ["--run-config", "train-dies-on='0' num-server-rounds=1"]
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    started = {"client": launch(app, *dies, env=ascii_only), "server": launch(parsing_app)}
    return {name: (run, *run.finish()) for name, run in started.items()}


def test_a_killed_client_of_an_app_without_our_line_costs_its_reply_only(
    lost: dict[str, tuple[LaunchRun, int, str, str]],
) -> None:
    """It runs in a worker, so Flower need not wait a minute for its heartbeat."""
    run, code, out, err = lost["client"]
    assert code == 0, err
    events = list(trace.read(run.folder / trace.FILE_NAME))
    [reply] = [each for each in events if each["event"] == "reply" and each["error"]]
    assert reply["error"].startswith("train of client 0: the worker (pid ")
    assert "was killed by SIGKILL (9)" in reply["error"]
    assert sum(each["event"] == "worker_started" for each in events) == 4, "each message had a worker"
    [told] = re.findall("^  client 0, train in round 1: (.*)", out, re.M)
    assert told.startswith("the worker was killed by SIGKILL (9)")


def test_a_serverapp_that_exits_ends_its_run_with_its_own_words(
    lost: dict[str, tuple[LaunchRun, int, str, str]], parsing_app: Path
) -> None:
    """A minute without a heartbeat would end it otherwise, and nothing would be told."""
    run, code, _, err = lost["server"]
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
def ends(launch: Launch) -> dict[str, LaunchRun]:
    """Start, at once, runs that do not come to a good end."""
    waits = "seconds=1000.0"
    configs = {"killed client": waits, "Ctrl-C": waits, "failed server": "fail='evaluate'"}
    environment = {CPU_LEASES.variable: "off"}  # else they wait for each other's cores
    return {
        name: launch(TINY_APP, "--clients=1", "--run-config", text, env=environment)
        for name, text in configs.items()
    }


def test_a_killed_client_is_named(ends: dict[str, LaunchRun]) -> None:
    run = ends["killed client"]
    run.wait_for_a_worker()
    pid = next(
        pid for pid in run.processes() if "flower-supernode" in Path(f"/proc/{pid}/cmdline").read_text()
    )
    os.kill(pid, signal.SIGKILL)
    code, _, err = run.finish()
    assert code == 1
    assert "ended with SIGKILL (-9)" in err.splitlines()[0]


def test_nothing_survives_ctrl_c(ends: dict[str, LaunchRun]) -> None:
    run = ends["Ctrl-C"]
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
    assert (history.highest_round, result["messages"], result["failed"]) == (0, 0, 0)


def test_superlink_reports_a_failed_server_app(ends: dict[str, LaunchRun]) -> None:
    code, _, err = ends["failed server"].finish()
    assert code == 1
    assert "Flower reports the run as finished:failed" in err.splitlines()[0]
    assert "RuntimeError: the evaluation fails on purpose" in err
    assert json.loads((ends["failed server"].folder / "result.json").read_text())["workers_started"] == 1
