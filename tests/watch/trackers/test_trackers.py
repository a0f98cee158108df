"""Trackers with their real libraries, offline: the data they receive from a run, and from its resumption."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from scripted_app import APP
from simulations import TIMEOUT_S, Simulation, command
from stub_host import StubHost

from flower_gpu import ConfigError, simulate, trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.watch.history import History
from flower_gpu.watch.trackers.points import MOST_CLIENTS, Points
from flower_gpu.watch.trackers.tracking import Tracking

pytestmark = pytest.mark.timeout(300)

ALL = ("tensorboard", "wandb", "mlflow")
SCORE = "clients/train/score (%)/client 2"


@dataclass
class Read:
    """The contents of a tracker after a run: values by name and step, and texts."""

    figures: dict[str, dict[int, float]]
    config: dict[str, str]
    texts: str


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """Run one round with all trackers, and resume the run for another round. One of three clients fails."""
    host = StubHost(tmp_path_factory.mktemp("tracked"), gpus=1)
    env = {
        **os.environ,
        **host.host.env,
        **host.env,
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{host.folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    options = ["--gpu-memory=2GiB", "--on-oom=fail", "--seed=7"]
    options += ["--run-config", "take-gib=1.5 too-much='1'"]
    ways = (
        ["--log-dir", str(host.logs), "--tracker", "tensorboard,wandb", "--tracker=mlflow"],
        ["--rounds=2"],
    )
    outputs = []
    for number, more in enumerate(ways):
        if number:
            more = [*more, "--resume", str(next(host.logs.iterdir()))]
        process = subprocess.Popen(
            command("leased", 3, *options, *more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        outputs.append(process.communicate(timeout=TIMEOUT_S)[0])
        assert process.returncode == 0, outputs
        services = [
            process_info
            for process_info in psutil.process_iter(["cmdline"])
            if "wandb-core" in str(process_info.info["cmdline"])
        ]
        assert not [
            process_info for process_info in services if str(process.pid) in process_info.info["cmdline"]
        ]
    [folder] = host.logs.iterdir()
    return Simulation(0, "\n".join(outputs), folder)


def read_tensorboard(folder: Path) -> Read:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()
    texts = {
        tag: [text.decode() for event in accumulator.Tensors(tag) for text in event.tensor_proto.string_val]
        for tag in tags["tensors"]
    }
    rows = [line.strip("| ").split(" | ") for table in texts["config"] for line in table.splitlines()[2:]]
    return Read(
        {tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in tags["scalars"]},
        {row[0]: row[-1] for row in rows},
        "\n".join([*texts["failures"], *texts["outcome"]]),
    )


def read_wandb(folder: Path) -> Read:
    """Read both files of the run with W&B's own reader, as ``wandb sync`` does."""
    read = Read({}, {}, "")
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    steps: list[int] = []
    for file in files:
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        lines = subprocess.run(inspect, capture_output=True, check=True, timeout=TIMEOUT_S).stdout
        for record in map(json.loads, lines.splitlines()):
            fields = record.get(record.get("type"), {})
            if record.get("type") == "history":
                item = fields["item"]
                steps.append(item["_step"])
                for name, value in item.items():
                    step = item.get("round", item.get("seconds"))
                    read.figures.setdefault(name, {})[step] = value
            elif record.get("type") == "run":
                assert fields.get("resume", False) == (file == files[1])
            for name, value in fields.get("config", fields).get("update", {}).items():
                (read.config if record["type"] in ("run", "config") else {})[name] = str(value)
            if record.get("type") == "summary":
                read.texts += "".join(f"{value}\n" for value in fields["update"].values())
    assert steps == sorted(set(steps)), "the second file continues after the first"
    return read


def read_mlflow(folder: Path) -> Read:
    # Imported here because the import takes a second.
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parents[1]}/mlflow.db")
    experiment = client.get_experiment_by_name("scripted")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", folder.name)
    figures = {
        name.replace("score ___", "score (%)"): {
            point.step: point.value for point in client.get_metric_history(run.info.run_id, name)
        }
        for name in run.data.metrics
    }
    assert run.data.tags["resumed.run_config.num-server-rounds"] == "2"
    return Read(figures, run.data.params, f"{run.data.tags['failures']}\n{run.data.tags['outcome']}")


READERS: dict[str, Callable[[Path], Read]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


@pytest.mark.parametrize("name", ALL)
def test_a_run_and_its_resumption_are_a_single_run_of_the_tracker(tracked: Simulation, name: str) -> None:
    read = READERS[name](tracked.folder)
    figures = read.figures
    assert figures["train/score (%)"] == {1: 1.0, 2: 1.0}, "of clients 0 and 2"
    assert figures[SCORE] == {1: 2.0, 2: 2.0}
    assert "clients/train/score (%)/client 1" not in figures
    assert figures["clients/train/score (%)/max"] == {1: 2.0, 2: 2.0}
    assert figures["rounds/train/messages"] == {1: 3, 2: 3}
    assert figures["rounds/train/failed"] == {1: 1, 2: 1}
    assert figures["rounds/out_of_memory"] == {1: 1, 2: 2}
    trace_of_run = History.read(tracked.folder / "trace.jsonl")
    parts = {part.round: part.seconds for part in trace_of_run.rounds.parts if part.task == "train"}
    assert figures["rounds/train/seconds"] == pytest.approx(parts)
    took = {call.round: call.seconds for call in trace_of_run.calls.workers if call.client == "0"}
    assert figures["clients/train/call_seconds/client 0"] == pytest.approx(took)
    assert set(figures["clients/train/gpu_peak_gib/max"]) == {1, 2}
    assert all(1.5 <= value <= 2 for value in figures["clients/train/gpu_peak_gib/max"].values())
    for name_of_figure in ("gpu/0/used_gib", "gpu/0/leased_gib"):
        of_gpu = figures[name_of_figure]
        assert of_gpu[max(of_gpu)] == 0, "after the run"
    assert read.config["app"] == "scripted" and read.config["seed"] == "7"
    assert read.config["strategy"] == "FedAvg" and read.config["run_config.take-gib"] == "1.5"
    for number in (1, 2):
        assert f"round {number}, train, client 1: " in read.texts, read.texts
    assert "out of memory" in read.texts and "completed" in read.texts


def test_a_run_says_where_to_look(tracked: Simulation) -> None:
    for way in ("tensorboard --logdir ", "wandb sync ", "mlflow ui --backend-store-uri sqlite:///"):
        assert len(re.findall(f"(?m)^tracker +{way}", tracked.output)) == 2, tracked.output
    # The hint also comes after the lines that the trackers' libraries print at exit.
    assert tracked.output.splitlines()[-1].split()[0] == "report"
    assert "warning: tracker" not in tracked.output


@pytest.mark.parametrize("name", ALL)
def test_a_missing_library_is_an_error_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'flower-gpu\[{name}\]'"):
        simulate(APP, 1, trackers=name, log_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_unknown_or_broken_trackers_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'neptune' is not one of tensorboard, wandb, mlflow"):
        simulate(APP, 1, trackers=["tensorboard", "neptune"], log_dir=tmp_path / "runs")
    with pytest.raises(ConfigError, match="cannot be used with log_dir=None"):
        simulate(APP, 1, trackers=["tensorboard"], log_dir=None)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="no API key"):
        simulate(APP, 1, trackers=["wandb"], log_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_unreachable_tracker_is_reported_when_it_fails_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # No server listens on this port.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = RunFolder(tmp_path)
    folder.tensorboard.write_text("in the way")
    with Tracking(["tensorboard", "mlflow"]).following(tmp_path, "app", {}):
        trace.write_to(tmp_path, "run_started", kind="simulate", name="app")
        for number in range(1, 4):
            which = {"round": number, "task": "train"}
            trace.write_to(tmp_path, "round_finished", **which, messages=1, failed=0, metrics={"x": 1})
        trace.write_to(tmp_path, "run_finished", outcome="completed")
    warnings = sorted(line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert [line.split(":")[2].strip() for line in warnings] == 2 * ["tracker mlflow"] + 2 * [
        "tracker tensorboard"
    ]
    for end in ("whatever it has not accepted is sent again later", "it has nothing of this run"):
        assert sum(line.endswith(end) for line in warnings) == 2, warnings
    assert not list(trace.read(folder.trace, only="tracker_started"))


# Node ids have 64 bits.
FIRST = 2**63 - 5


def of_clients(points: Points, clients: Sequence[int], server_round: int = 1) -> dict[str, float]:
    """Return the values of a round's clients, each of which replies with its number."""
    which = {"round": server_round, "task": "train"}
    events = [
        trace.make("round_started", **which, messages=len(clients)),
        *(trace.make("reply", **which, node=FIRST + n, error=None, metrics={"x": n}) for n in clients),
        trace.make("round_finished", **which, messages=len(clients), failed=0, metrics={}),
    ]
    points.history.feed(events)
    [point] = points.of(events[-1])
    return {name: x for name, x in point.values.items() if name.startswith("clients/")}


def test_many_clients_get_no_series_each() -> None:
    values = of_clients(Points(History(keep_finished=False)), range(MOST_CLIENTS + 1))
    prefix = "clients/train/x"
    assert values == {f"{prefix}/mean": 10.0, f"{prefix}/min": 0, f"{prefix}/max": MOST_CLIENTS}


@pytest.mark.parametrize("is_told", [True, False])
def test_the_limit_applies_to_clients_of_the_run_not_of_a_round(is_told: bool) -> None:
    """Sampling would give each round other series.

    Without a declared number of clients, the tracker counts.
    """
    history = History(keep_finished=False)
    points = Points(history)
    if is_told:
        history.feed([trace.make("run_started", kind="simulate", name="app", clients=1000)])
    names = set[str]()
    for number in range(10):
        names |= of_clients(points, range(10 * number, 10 * number + 10), number).keys()
    assert len(names) == 3 + (0 if is_told else MOST_CLIENTS)


def test_statistics_of_client_values_that_are_not_finite() -> None:
    values = iter(("NaN", "Infinity", 1.0))
    history = History(keep_finished=False)
    which = {"round": 1, "task": "train"}
    events = [trace.make("round_started", **which, messages=3)]
    events += [
        trace.make("reply", **which, node=n, error=None, metrics={"x": next(values)}) for n in range(3)
    ]
    events.append(trace.make("round_finished", **which, messages=3, failed=0, metrics={}))
    history.feed(events)
    [point] = Points(history).of(events[-1])
    prefix = "clients/train/x"
    assert math.isnan(point.values[f"{prefix}/mean"]) and math.isnan(point.values[f"{prefix}/client 0"])
    assert (point.values[f"{prefix}/min"], point.values[f"{prefix}/max"]) == (1.0, math.inf)
