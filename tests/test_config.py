"""Settings of a call: where they come from, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from flower_gpu import run_in_worker
from flower_gpu.config import ENVIRONMENT, START_METHODS, WorkerSettings, cores
from flower_gpu.errors import ConfigError, FlowerGPUError


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert WorkerSettings.resolve() == WorkerSettings("auto", None, {}, None, threads=cores())


@pytest.mark.parametrize("method", START_METHODS)
def test_start_methods(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.resolve(start_method=method).start_method == method
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", method)
    assert WorkerSettings.resolve().start_method == method


BAD = [
    (
        {"start_method": "Spawn"},
        "start_method 'Spawn' is not one of auto, forkserver, spawn, fork, inline, in-process",
    ),
    ({"start_method": "thread"}, "start_method 'thread' is not one of auto, forkserver,"),
    ({"start_method": 5}, "start_method 5 is not one of"),
    ({"timeout_s": 0}, "timeout_s must be a positive number of seconds or None, not 0"),
    ({"timeout_s": -1.5}, "timeout_s must be a positive number of seconds or None, not -1.5"),
    ({"timeout_s": float("nan")}, "timeout_s must be a positive number of seconds or None, not nan"),
    ({"timeout_s": float("inf")}, "timeout_s must be a positive number of seconds or None, not inf"),
    ({"timeout_s": 1e20}, "timeout_s must be a positive number of seconds or None, not 1e+20 (at most"),
    ({"timeout_s": 10**400}, "timeout_s must be a positive number of seconds or None, not 1000"),
    ({"timeout_s": "10"}, "timeout_s must be a positive number of seconds or None, not '10'"),
    ({"env": {1: "a"}}, "env maps names to strings, not 1 to 'a'"),
    ({"env": {"CUDA_VISIBLE_DEVICES": 0}}, "env maps names to strings, not 'CUDA_VISIBLE_DEVICES' to 0"),
    ({"env": {"A": None}}, "env maps names to strings, not 'A' to None"),
    ({"env": {"OMP_NUM_THREADS": 2}}, "env maps names to strings, not 'OMP_NUM_THREADS' to 2"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[str(settings)[:60] for settings, _ in BAD])
def test_bad_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerSettings.resolve(**settings)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FlowerGPUError)
    with pytest.raises(ConfigError):
        run_in_worker("math:sqrt", 4.0, **settings)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "FLOWER_GPU_START_METHOD",
            "forks",
            "FLOWER_GPU_START_METHOD='forks' is not one of auto, forkserver, spawn, fork, inline, in-process",
        ),
        ("FLOWER_GPU_TIMEOUT_S", "soon", "FLOWER_GPU_TIMEOUT_S='soon' is not a number of seconds"),
        ("FLOWER_GPU_TIMEOUT_S", "-1", "timeout_s must be a positive number of seconds or None, not -1.0"),
        ("FLOWER_GPU_TIMEOUT_S", "nan", "timeout_s must be a positive number of seconds or None, not nan"),
        ("FLOWER_GPU_CONCURRENCY", "0", "FLOWER_GPU_CONCURRENCY='0' is not a number of workers, 1 or more"),
    ],
)
def test_bad_values_in_the_environment(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        WorkerSettings.resolve()
    assert message in str(caught.value)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "fork")
    monkeypatch.setenv("FLOWER_GPU_TIMEOUT_S", "12.5")
    monkeypatch.setenv("FLOWER_GPU_CLIENT", "7")
    monkeypatch.setenv("FLOWER_GPU_CONCURRENCY", "1000000")
    assert WorkerSettings.resolve() == WorkerSettings("fork", 12.5, {}, "7", threads=1)


def test_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "no method")
    monkeypatch.setenv("FLOWER_GPU_TIMEOUT_S", "no number")
    monkeypatch.setenv("FLOWER_GPU_CLIENT", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    settings = WorkerSettings.resolve("spawn", 3, {"OMP_NUM_THREADS": "2"}, "8")
    assert settings == WorkerSettings("spawn", 3, {"OMP_NUM_THREADS": "2"}, "8", threads=2)


def test_empty_variables_are_unset_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("START_METHOD", "TIMEOUT_S", "CONCURRENCY")
    for name in ("OMP_NUM_THREADS", *(f"FLOWER_GPU_{variable}" for variable in variables)):
        monkeypatch.setenv(name, "")
    assert WorkerSettings.resolve() == WorkerSettings(threads=cores())


def test_settings_do_not_change() -> None:
    env = {"A": "b"}
    settings = WorkerSettings(env=env)
    env["A"] = "changed"
    assert settings.env["A"] == "b"
    with pytest.raises(FrozenInstanceError):
        settings.timeout_s = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        settings.env["A"] = "changed"  # type: ignore[index]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("task.train", "'task.train' does not name a function; write it as 'package.module:function'"),
        ("task:", "'package.module:function'"),
        (":train", "'package.module:function'"),
        ("task:train()", "'package.module:function'"),
        ("my-task:train", "'package.module:function'"),
        ("", "'package.module:function'"),
        ("../task.py:train", "'package.module:function'"),
        (5, "a task is a function or a 'package.module:function' string, not int"),
        (None, "not NoneType"),
    ],
)
def test_bad_tasks(task: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_in_worker(task)
    assert message in str(caught.value)
