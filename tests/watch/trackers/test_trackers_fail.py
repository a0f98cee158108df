"""Trackers that refuse points or are unreachable for a while, and the points that their copy then lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import MLflowServer
from waiting import until

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.watch.trackers.tracking import Tracking


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[MLflowServer]:
    with MLflowServer() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield server


def begin(folder: Path) -> None:
    trace.write_to(folder, "run_started", kind="simulate", name="app", clients=3)
    trace.write_to(folder, "strategy_started", strategy="FedAvg", num_rounds=9)


def add_round(folder: Path, number: int, error: str | None = None, **metrics: Any) -> None:
    round_fields = {"round": number, "task": "train"}
    trace.write_to(folder, "round_started", **round_fields, messages=1)
    if error is not None:
        trace.write_to(folder, "reply", **round_fields, node=1, error=error, metrics={}, aggregated=True)
    trace.write_to(folder, "round_finished", **round_fields, messages=1, failed=0, metrics=metrics)


def finish(folder: Path) -> None:
    trace.write_to(folder, "run_finished", outcome="completed")


def warnings_in(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "warning: tracker" in line]


def test_a_tracker_resumes_after_an_outage_without_duplicates(
    mlflow: MLflowServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tracker's run is created once and each point is sent once, whichever request failed first."""
    with Tracking(["mlflow"]).following(tmp_path, "app", {"a": 1}):
        mlflow.is_down = True
        begin(tmp_path)
        add_round(tmp_path, 1, x=1.0)
        until(lambda: mlflow.failures, "the request to create the run has failed")
        mlflow.is_down = False
        until(lambda: ("train/x", 1) in mlflow.metrics, "the first round has arrived")
        mlflow.is_down = True
        failures = mlflow.failures
        for number in range(2, 7):
            add_round(tmp_path, number, x=1.0)
        until(lambda: mlflow.failures > failures, "the request with the later rounds has failed")
        mlflow.is_down = False
        finish(tmp_path)
    assert sorted(step for key, step in mlflow.metrics if key == "train/x") == [*range(1, 7)]
    assert mlflow.tags["outcome"] == "completed"
    warnings = warnings_in(capsys)
    assert warnings and all("is sent again later" in line for line in warnings), warnings


@pytest.mark.parametrize("refused", [(2,), (1, 2, 3), (4,)])
def test_only_the_refused_points_are_missing(
    refused: tuple[int, ...], mlflow: MLflowServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow.refused.add("train/bad")
    with Tracking(["mlflow"]).following(tmp_path, "app", {}):
        begin(tmp_path)
        for number in range(1, 5):
            add_round(tmp_path, number, **{"bad" if number in refused else "x": 1.0})
        finish(tmp_path)
    steps = sorted(step for key, step in mlflow.metrics if key == "train/x")
    assert steps == [number for number in range(1, 5) if number not in refused]
    assert mlflow.tags["outcome"] == "completed"
    count = len(refused)
    assert f"{count} point{'s are' if count > 1 else ' is'} missing there" in warnings_in(capsys)[-1]


def test_event_files_are_written_once_their_folder_can_be_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path).tensorboard
    folder.write_text("in the way")
    with Tracking(["tensorboard"]).following(tmp_path, "app", {}):
        begin(tmp_path)
        add_round(tmp_path, 1, x=1.0)
        until(lambda: "sent again later" in capsys.readouterr().err, "the first try has failed")
        folder.unlink()
        add_round(tmp_path, 2, x=2.0)
        finish(tmp_path)
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    assert {event.step: event.value for event in accumulator.Scalars("train/x")} == {1: 1.0, 2: 2.0}


ODD = "bad file im\udcffage.png"
LONG = "x" * 300


def test_invalid_texts_long_names_and_nonfinite_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One name is not valid UTF-8, and others are longer than MLflow's store allows."""
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    long = {LONG: 1.0, f"{LONG}y": 2.0}
    with Tracking(["tensorboard", "mlflow"]).following(tmp_path, "app", {LONG: 1, "path": ODD, ODD: "x"}):
        begin(tmp_path)
        add_round(tmp_path, 1, f"ValueError: {ODD}", nan="NaN", inf="Infinity", least="-Infinity", **long)
        finish(tmp_path)
    assert warnings_in(capsys) == []

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("app").experiment_id])
    shortened = {name: value for name, value in run.data.metrics.items() if name.startswith("train/xxx")}
    assert sorted(shortened.values()) == [1.0, 2.0] and {len(name) for name in shortened} == {250}
    assert math.isnan(run.data.metrics["train/nan"]) and run.data.metrics["train/inf"] > 1e300
    shown = r"bad file im\udcffage.png"
    assert run.data.tags["failures"].endswith(f"ValueError: {shown}") and run.data.params["path"] == shown

    accumulator = EventAccumulator(str(RunFolder(tmp_path).tensorboard))
    accumulator.Reload()
    values = {name: accumulator.Scalars(f"train/{name}")[0].value for name in ("nan", "inf", "least", LONG)}
    assert math.isnan(values.pop("nan")) and list(values.values()) == [math.inf, -math.inf, 1.0]
    [failure] = accumulator.Tensors("failures")
    assert failure.tensor_proto.string_val[0].decode().endswith(shown)
