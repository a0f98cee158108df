"""``flower-gpu simulate`` as a user types it: refused options, settings of the run, and its end."""

from __future__ import annotations

import html
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from command_shell import Shell
from run_programs import run, run_python
from scripted_app import write_app
from waiting import until

from flower_gpu import trace
from flower_gpu.cli.main import main
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import RunClock, tries_of
from flower_gpu.watch.report.page import write_report
from flower_gpu.watch.report.totals import Totals

pytestmark = pytest.mark.timeout(300)

CONFIG = """
num-server-rounds = 2
num-clients = 7
mode = "plain"
folder = ""
task.rate = 0.5

[tool.flower-gpu.choices]
mode = ["plain", "raise", "wait"]
"""
APP = """
import os, time
from logging import INFO
from pathlib import Path

from flwr.common.logger import log

data = []


def load(folder, size):
    with open(Path(folder) / "loaded", "a") as file:
        file.write(f"{os.getpid()}\\n")
    data.extend(range(size))


@server.main()
def main(grid, context):
    config = context.run_config
    (Path(config["folder"]) / "policy").write_text(os.environ.get("FLOWER_GPU_POLICY", "none"))
    arrays = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    FedAvg().start(grid, arrays, num_rounds=config["num-server-rounds"])
    if config["mode"] == "raise":
        raise RuntimeError("the server has\\nlost its way")


@client.train()
def train(message, context):
    config = context.run_config
    folder = Path(config["folder"])
    log(INFO, "a client trains with %d others", 3)
    weights = message.content["arrays"]["w"].numpy()
    if config["mode"] == "wait" and weights[0] >= 1 and not (folder / "go").exists():
        (folder / "waits").touch()
        time.sleep(600)
    arrays = ArrayRecord({"w": Array(weights + np.float32(1))})
    metrics = MetricRecord({"num-examples": 1, "rate": config["task.rate"]})
    if data:
        metrics["images"] = len(data)
        data.clear()
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""


@pytest.fixture
def shell(shell: Shell) -> Shell:
    """A shell with runs that share the fork server of all tests."""
    shell.env["FLOWER_GPU_STATE_DIR"] = os.environ["FLOWER_GPU_STATE_DIR"]
    return shell


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A Flower app that adds one to its weights."""
    return write_app(tmp_path / "app", APP, "counting", CONFIG).parent


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "flower_gpu.cli", "simulate", *map(str, arguments)]


def simulate(shell: Shell, folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(command(*arguments), cwd=folder, env=shell.env)


Refusal = Callable[..., str]
KEYS = "folder, mode, num-clients, num-server-rounds, task.rate"


@pytest.fixture
def refusal(
    app: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Refusal]:
    """Run a command in this process, check that it is refused and makes no file, and return the error."""
    monkeypatch.chdir(app.parent)
    variables = dict(os.environ)

    def refusal(*arguments: str) -> str:
        before = sorted(app.parent.rglob("*"))
        try:
            code = main(["simulate", *arguments])
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
        output, error = capsys.readouterr()
        assert (code, output) == (2, "")
        # A busy machine shows this line while it imports Flower.
        error = error.replace("flower-gpu simulate: importing Flower\n", "")
        assert error.startswith("flower-gpu simulate: ") and error.count("\n") == 1
        assert [path for path in sorted(app.parent.rglob("*")) if "pycache" not in str(path)] == before
        return error

    yield refusal
    os.environ.clear()
    os.environ.update(variables)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("", "--num-supernodes N (or --clients N) is missing"),
        ("--num-supernodes 0", "must be a whole number, 1 or more, not '0'"),
        (
            "--clients 3 --run-config lr=0.1",
            f"run config lr: counting declares no such key (its keys: {KEYS})",
        ),
        ("--clients 3 -c mode", "'mode' is not of the form key=value"),
        ("--clients 3 -c mode=1,task.rate=3", "separate keys by spaces, not by commas: mode=1,task.rate=3"),
        (
            "--clients 3 --rounds 1 -c num-server-rounds=1",
            "--rounds and --run-config num-server-rounds give the same",
        ),
        ("--clients 3 -c \"mode='odd'\"", "counting takes only plain, raise, wait"),
        (
            "--clients 3 -c num-server-rounds='\"many\"'",
            'run config num-server-rounds="many" is a string, but counting takes a number',
        ),
        ("--clients 3 -c num-clients=4", "num-clients=4, but there are 3 clients"),
        ("--clients 3 -c none.toml", "--run-config none.toml: No such file"),
        ("--clients 3 --preload app:", "--preload: 'app:' does not name a function; write"),
        ("--clients 3 --preload nowhere:load", "there is no module 'nowhere'"),
        ("--clients 3 --preload counting.app.load", "no module 'counting.app.load'"),
        ("--clients 3 --gpu require", "this node's policy is require"),
        ('--clients 3 --preload "counting.app:load 3"', "--preload: '3' is not of the form"),
        ("--clients 3 --state-memory much", "--state-memory: 'much' is not a memory size"),
        ("--clients 3 --gpu-memory 1GiB --num-gpus 1", "not allowed with argument"),
        ("--clients 3 --resume app --log-dir x", "not allowed with argument"),
        ("--clients 3 --resume nothing", "--resume nothing: there is no such folder"),
        ("--clients 3 --resume app", "--resume app: it has no trace.jsonl of `flower-gpu simulate`"),
        ("--clients 3 --log-dir app/pyproject.toml/x", "pyproject.toml is not a folder"),
        ("--clients 3 --bogus", "unknown: --bogus (options: flower-gpu simulate --help)"),
        ("--clients 3 --faster", "unknown: --faster (options: flower-gpu simulate --help)"),
        ("--num-supernode 3", "unknown: --num-supernode 3; did you mean --num-supernodes?"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(refusal: Refusal, options: str, reason: str) -> None:
    assert reason in refusal("app", *shlex.split(options))


def test_a_folder_without_an_app_is_refused_and_the_app_may_be_the_current_folder(
    refusal: Refusal, app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing is not a folder" in refusal("nothing", "--clients", "3")
    assert ". has no pyproject.toml" in refusal("--clients", "3")
    monkeypatch.chdir(app)
    assert "counting takes only plain" in refusal("--clients", "3", "-c", "mode='odd'")


def test_a_byte_order_mark_is_refused_in_pyproject_and_accepted_in_a_run_config(
    refusal: Refusal, app: Path
) -> None:
    values = app.parent / "values.toml"
    values.write_text("mode = 'odd'", encoding="utf-8-sig")
    assert "counting takes only plain" in refusal("app", "--clients", "3", "-c", "values.toml")
    project = app / "pyproject.toml"
    project.write_text(project.read_text(), encoding="utf-8-sig")
    assert "begins with a byte order mark" in refusal("app", "--clients", "3")


def test_a_run_that_cannot_be_resumed_is_refused(refusal: Refusal, app: Path) -> None:
    checkpoint = app.parent / "run" / "checkpoint" / "checkpoint.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    config = {"app": "other", "app_folder": "/apps/other", "num_supernodes": 3, "seed": 1}
    trace.write_to(app.parent / "run", "run_started", settings={**config, "run_config": {"their-own": 1}})
    text = refusal("app", "--resume", "run")
    assert "that is a run of other (/apps/other), not of counting" in text and str(app) in text
    checkpoint.unlink()
    for strategy_event, why in (
        ({}, "it ended before a strategy was started"),
        (
            {"strategy": "LegacyFedAvg", "resumes": None},
            "the state of its strategy LegacyFedAvg is not known",
        ),
    ):
        if strategy_event:
            trace.write_to(app.parent / "run", "strategy_started", **strategy_event)
        text = refusal("app", "--num-supernodes", "3", "--resume", "run")
        assert f"it has no checkpoint, because {why}" in text


def test_no_heavy_library_is_imported_before_the_options_are_checked(shell: Shell, app: Path) -> None:
    code = """
import sys
from flower_gpu.cli import main as cli
print(cli.main(["simulate", "app", "--num-supernodes", "3", "-c", "lr=1"]))
print(sorted({"torch", "flwr", "numpy", "tqdm", "rich"} & set(sys.modules)))
"""
    done = run_python(code, cwd=app.parent, env=shell.env)
    assert done.stdout == "2\n[]\n", done.stderr


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_a_run_has_the_given_settings_and_each_worker_gets_data_that_is_loaded_once(
    shell: Shell, app: Path
) -> None:
    parent = app.parent
    (parent / "values.toml").write_text(f"folder = {json.dumps(str(parent))}\n[task]\nrate = 0.25\n")
    options = ["--num-supernodes", "3", "--max-workers", "2", "--calls-per-worker", "1", "--seed", "11"]
    options += ["--gpu", "never", "--timeout-s", "100", "--log-dir", "logs", "--no-progress"]
    options += ["--preload", f"counting.app:load folder='{parent}' size=3"]
    done = simulate(shell, parent, "app", *options, "-c", "values.toml", "-c", "num-server-rounds=3")
    assert done.returncode == 0, done.stderr
    assert "rounds" not in done.stdout and "outcome" not in done.stderr
    (folder,) = (parent / "logs").iterdir()
    result = result_of(folder)
    config = result["settings"]
    assert (config["num_supernodes"], config["seed"], config["calls_per_worker"]) == (3, 11, 1)
    assert config["run_config"] == {
        "num-server-rounds": 3,
        "num-clients": 3,
        "mode": "plain",
        "folder": str(parent),
        "task.rate": 0.25,
    }
    assert (result["outcome"], result["rounds_finished"], result["messages"]) == ("completed", 3, 9)
    assert result["metrics"] == {"train": {"rate": 0.25, "images": 3.0}}, "each of 9 calls had all the data"
    assert len((parent / "loaded").read_text().splitlines()) == 1
    assert (parent / "policy").read_text() == "never", "the policy also applies to the server's calls"


@pytest.mark.parametrize(
    ("preload", "is_raised_by_app", "reason"),
    [
        ("counting.app:nothing", False, "module 'counting.app' has no 'nothing'"),
        ("counting.app:load size=3", True, "missing 1 required positional argument: 'folder'"),
    ],
)
def test_a_run_fails_at_its_start_if_its_data_cannot_be_loaded(
    shell: Shell, app: Path, preload: str, is_raised_by_app: bool, reason: str
) -> None:
    options = ["--num-supernodes", "4", "--gpu", "never", "--no-progress", "-c", f"folder='{app.parent}'"]
    done = simulate(shell, app.parent, "app", *options, "--preload", preload)
    assert done.returncode == 2
    error = done.stderr[done.stderr.index("flower-gpu simulate: preload counting.app:") :]
    assert reason in error.splitlines()[0]
    assert ("Traceback" in error) == is_raised_by_app
    (folder,) = (app.parent / "runs").iterdir()
    result = result_of(folder)
    assert (result["outcome"], result["messages"]) == ("failed", 0)


def test_quiet_shows_only_the_summary_and_the_path_of_the_results(shell: Shell, app: Path) -> None:
    """The path can be pasted into a shell, even if the folder's name is not UTF-8."""
    parent = app.parent
    odd = parent / os.fsdecode(b"caf\xe9 'n")
    options = ["--num-supernodes", "3", "--gpu", "never", "-c", f"folder='{parent}'", "-q", "--log-dir", odd]
    quiet = simulate(shell, parent, "app", *options)
    assert (quiet.returncode, quiet.stdout) == (0, "")
    first, *_, results, report = quiet.stderr.splitlines()
    assert first.split() == ["outcome", "completed"]
    label, shown = results.split(maxsplit=1)
    assert report.split(maxsplit=1) == ["report", f"flower-gpu report {shown}"]
    listed = subprocess.run(["bash", "-c", f"ls {shown}"], cwd=parent, capture_output=True, timeout=60)
    assert label == "results" and b"result.json" in listed.stdout.split(), listed.stderr
    assert "ROUND" not in quiet.stderr and "trains with" not in quiet.stderr


def test_an_exception_of_the_server_is_shown_and_fails_the_run(shell: Shell, app: Path) -> None:
    parent = app.parent
    values = f"mode='raise' num-server-rounds=1 folder='{parent}'"
    done = simulate(shell, parent, "app", "--num-supernodes", "2", "-c", values)
    assert done.returncode == 1
    # The first text comes from the server, the second from clients.
    assert "[ROUND 1/1]" in done.stderr and "trains with 3" in done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == "flower-gpu simulate: RuntimeError: the server has (the traceback is above)"
    assert "Traceback (most recent call last):" in lines and "RuntimeError: the server has" in lines
    (folder,) = (parent / "runs").iterdir()
    result = result_of(folder)
    assert (result["outcome"], result["error"]) == ("failed", "RuntimeError: the server has")
    assert result["rounds_finished"] == 1
    assert (folder / str(result["model"])).exists()
    report = html.unescape(write_report(folder).read_text())
    seed = result["settings"]["seed"]
    for fact in (
        *(f"<dd>{seed}</dd>", 'mode = "raise"', "num-server-rounds = 1", f"flwr {version('flwr')}"),
        *(str(result["model_sha256"]), "RuntimeError: the server has"),
    ):
        assert fact in report, fact


def test_after_ctrl_c_the_run_can_be_resumed_with_the_printed_command(shell: Shell, app: Path) -> None:
    parent = app.parent
    options = ["app", "--num-supernodes", "3", "--max-workers", "2", "--seed", "4", "--num-gpus", "0.5"]
    options += ["-c", f"mode='wait' num-server-rounds=3 folder='{parent}'"]
    # PYTHONPATH makes this package importable if it is not installed.
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    process = shell.start(*command(*options), cwd=parent, stderr=subprocess.PIPE, env=path)
    until(lambda: (parent / "waits").exists() or process.poll() is not None, "round 2")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGINT, errors
    (folder,) = (parent / "runs").iterdir()
    assert errors.splitlines()[-1] == (
        "flower-gpu simulate: interrupted; to continue after the last finished round, add this to the same "
        f"command: --resume runs/{folder.name}"
    )
    assert "Traceback" not in errors
    note = "note: --num-gpus 0.5 has no effect: all calls run on the CPU, no GPU can be used here"
    assert sum(line.startswith(note) for line in errors.splitlines()) == 1
    result = result_of(folder)
    assert (result["outcome"], result["rounds_finished"], result["messages"], result["failed"]) == (
        *("interrupted", 1, 3, 0),
    )
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["round", "1"]
    history = History.read(folder / "trace.jsonl")
    assert (history.rounds.highest_round, history.rounds.messages_sent, history.rounds.messages_failed) == (
        1,
        3,
        0,
    )
    clock = RunClock.of(history)
    totals = Totals(history, clock, tries_of(history, clock), {})
    assert totals.failures == {}, "workers that were ended with the run do not count as failed"
    assert totals.workers == result["workers_started"]
    (parent / "go").touch()
    done = simulate(shell, parent, *options, "--resume", f"runs/{folder.name}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].split() == ["report", "flower-gpu", "report", f"runs/{folder.name}"]
    assert not (folder / "report.html").exists()
    result = result_of(folder)
    ended = (result["outcome"], result["rounds_finished"], result["resumed_after_round"])
    assert ended == ("completed", 3, 1)
    assert [row["round"] for row in result["rounds"]] == [1, 2, 3]
