"""Settings of a call: where they come from, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from flower_gpu import options, run_in_worker
from flower_gpu.calls.settings import CallSettings, GPUSettings, HostSettings, WorkerSettings
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.options import CALL, START_METHODS, VARIABLES
from flower_gpu.workers.threads import cores


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert WorkerSettings.resolve({}) == WorkerSettings("auto", None, {}, None, threads=cores())
    assert GPUSettings.resolve() == GPUSettings()


@pytest.mark.parametrize("method", START_METHODS)
def test_start_methods(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.resolve({"start_method": method}).start_method == method
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", method)
    assert WorkerSettings.resolve({}).start_method == method


SECONDS = "must be a number of seconds above 0, at most 1e+09, not"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"start_method": "Spawn"},
        ConfigError,
        "start_method='Spawn' is not one of auto, forkserver, spawn, fork, in-process",
    ),
    ({"start_method": 5}, TypeError, "start_method must be one of the words auto, forkserver"),
    ({"timeout_s": 0}, ConfigError, f"timeout_s {SECONDS} 0"),
    ({"timeout_s": -1.5}, ConfigError, f"timeout_s {SECONDS} -1.5"),
    ({"timeout_s": float("nan")}, ConfigError, f"timeout_s {SECONDS} nan"),
    ({"timeout_s": float("inf")}, ConfigError, f"timeout_s {SECONDS} inf"),
    ({"timeout_s": 10**400}, ConfigError, f"timeout_s {SECONDS} 1000"),
    ({"timeout_s": "10"}, TypeError, f"timeout_s {SECONDS} a str: '10'"),
    ({"timeout_s": True}, TypeError, f"timeout_s {SECONDS} a bool: True"),
    ({"lease_timeout_s": 0}, ConfigError, f"lease_timeout_s {SECONDS} 0"),
    ({"lease_timeout_s": "10"}, TypeError, f"lease_timeout_s {SECONDS} a str: '10'"),
    ({"on_oom": "pray"}, ConfigError, "on_oom='pray' is not one of retry, cpu, fail"),
    ({"gpus": 1}, TypeError, "no option 'gpus'; there are start_method, timeout_s"),
    ({"env": {1: "a"}}, ConfigError, "env maps names to strings, not 1 to 'a'"),
    ({"env": {"A": None}}, ConfigError, "env maps names to strings, not 'A' to None"),
    ({"env": {"OMP_NUM_THREADS": 2}}, ConfigError, "env maps names to strings, not 'OMP_NUM_THREADS' to 2"),
]


@pytest.mark.parametrize(("given", "kind", "message"), BAD, ids=[str(given)[:60] for given, _, _ in BAD])
def test_bad_values(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        CallSettings.resolve(given)
    assert message in str(caught.value)
    if kind is ConfigError:
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, FlowerGPUError)


def test_a_call_refuses_bad_values() -> None:
    with pytest.raises(ConfigError):
        run_in_worker("math:sqrt", 4.0, timeout_s=0)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "FLOWER_GPU_START_METHOD",
            "forks",
            "FLOWER_GPU_START_METHOD='forks' is not one of auto, forkserver, spawn, fork, in-process",
        ),
        ("FLOWER_GPU_TIMEOUT_S", "soon", f"FLOWER_GPU_TIMEOUT_S {SECONDS} 'soon'"),
        ("FLOWER_GPU_TIMEOUT_S", "-1", f"FLOWER_GPU_TIMEOUT_S {SECONDS} '-1'"),
        ("FLOWER_GPU_TIMEOUT_S", "nan", f"FLOWER_GPU_TIMEOUT_S {SECONDS} 'nan'"),
        ("FLOWER_GPU_PLACEMENT", "odd", "FLOWER_GPU_PLACEMENT='odd' is not one of spread, pack"),
        ("FLOWER_GPU_RESERVE", "much", "FLOWER_GPU_RESERVE='much' is no size of memory"),
        ("FLOWER_GPU_CONCURRENCY", "0", "FLOWER_GPU_CONCURRENCY must be a whole number, 1 or more, not '0'"),
    ],
)
def test_bad_values_in_the_environment(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        CallSettings.resolve({})
    assert message in str(caught.value)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "fork")
    monkeypatch.setenv("FLOWER_GPU_TIMEOUT_S", "12.5")
    monkeypatch.setenv("FLOWER_GPU_CLIENT", "7")
    monkeypatch.setenv("FLOWER_GPU_CONCURRENCY", "1000000")
    assert WorkerSettings.resolve({}) == WorkerSettings("fork", 12.5, {}, "7", threads=1)


def test_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "no method")
    monkeypatch.setenv("FLOWER_GPU_TIMEOUT_S", "no number")
    monkeypatch.setenv("FLOWER_GPU_CLIENT", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    env = {"OMP_NUM_THREADS": "2"}
    settings = WorkerSettings.resolve({"start_method": "spawn", "timeout_s": 3, "env": env, "name": "8"})
    assert settings == WorkerSettings("spawn", 3, env, "8", threads=2)


def test_empty_variables_are_unset_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", *VARIABLES):
        monkeypatch.setenv(name, "")
    worker, host = WorkerSettings(threads=cores()), HostSettings(is_leased=True)
    assert CallSettings.resolve({}) == CallSettings(worker, GPUSettings(), host)


def test_every_option_of_the_table_that_has_a_variable_reaches_the_environment() -> None:
    values: dict[str, Any] = {
        name: option.kind.words[-1] if option.kind and option.kind.words else 1
        for name, option in CALL.items()
        if option.variable and name != "num_gpus"
    }
    env = options.environment(values, {"FLOWER_GPU_NUM_GPUS": "2", "HOME": "/root"})
    assert env == {"HOME": "/root", **{CALL[name].variable: str(value) for name, value in values.items()}}


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
