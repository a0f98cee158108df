"""Settings of a call: their sources, their precedence, and refused values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flower_gpu import options, run_in_worker
from flower_gpu.calls.settings import WorkerSettings, call_settings, checked_environment
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.gpu.policy import DevicePolicy
from flower_gpu.leases.lease import LeaseRequest
from flower_gpu.options import CALL, VARIABLES, resolve_all
from flower_gpu.workers.threads import cores


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def worker(options: dict[str, Any]) -> WorkerSettings:
    return call_settings(options).worker


def test_defaults() -> None:
    assert worker({}) == WorkerSettings("auto", None, {}, None, (), cores())
    gpu = call_settings({}, base={}).gpu
    assert (gpu.policy, gpu.request, gpu.on_oom) == (DevicePolicy("offer"), LeaseRequest(), "retry")
    assert (gpu.placement, gpu.reserve_bytes) == ("spread", 256 << 20)
    assert gpu.lease_timeout_s == CALL["lease_timeout_s"].default


# The order of precedence. Sources after the first with a value are not read.
PLACES = [
    # Option, argument, variable and node config, then the resulting value.
    ("on_oom", "cpu", "wrong", {}, "cpu"),
    ("on_oom", None, "fail", {}, "fail"),
    ("on_oom", None, "", {}, "retry"),
    ("num_cpus", 2, "wrong", {"num-cpus": 0.5}, 0.5),
    ("num_cpus", 2, "wrong", {}, 2),
    ("num_cpus", None, "3", {}, 3),
    ("num_cpus", None, "", {}, None),
    ("gpu", "wrong", "never", {"gpu": "force"}, "force"),
    ("gpu", "wrong", "never", {}, "never"),
    ("gpu", "require", "", {}, "require"),
    ("gpu", None, "", {}, "offer"),
    ("gpu_ids", 4, "2,3", {"gpu-ids": 1}, (1,)),
    ("gpu_ids", 4, "2,3", {"gpu": "force"}, (2, 3)),
    ("gpu_ids", "GPU-ab", "", {}, ("GPU-ab",)),
]


@pytest.mark.parametrize(("name", "argument", "text", "config", "value"), PLACES)
def test_an_option_has_the_value_of_the_first_source(
    name: str, argument: Any, text: str, config: dict[str, Any], value: Any
) -> None:
    option = CALL[name]
    assert option.resolve(argument, {option.variable: text}, config) == value


def test_an_amount_in_an_earlier_source_replaces_the_other_amount() -> None:
    environ = {"FLOWER_GPU_NUM_GPUS": "wrong"}
    values, given = resolve_all({"gpu_memory": "2GiB"}, environ)
    assert [*given] == ["gpu_memory"] and values["gpu_memory"] == 2 << 30
    assert [*resolve_all({"gpu_memory": "wrong"}, environ, {"num-gpus": 0.5})[1]] == ["num_gpus"]


def test_a_default_is_defined_only_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a change of a default is a change of a single line."""
    monkeypatch.setattr(options, "CALL", table := dict(CALL))
    table["lease_timeout_s"] = replace(CALL["lease_timeout_s"], default=7.0)
    assert call_settings({}).gpu.lease_timeout_s == 7.0
    assert "default: 7 for a GPU" in table["lease_timeout_s"].described


SECONDS = "must be a number of seconds above 0, at most 1e+09, not"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"start_method": "Spawn"},
        ConfigError,
        "start_method='Spawn' is not one of auto, forkserver, spawn, fork, in-process",
    ),
    ({"start_method": 5}, TypeError, "start_method must be one of the words auto, forkserver"),
    ({"timeout_s": float("nan")}, ConfigError, f"timeout_s {SECONDS} nan"),
    ({"timeout_s": float("inf")}, ConfigError, f"timeout_s {SECONDS} inf"),
    ({"timeout_s": 10**400}, ConfigError, f"timeout_s {SECONDS} 1000"),
    ({"timeout_s": True}, TypeError, f"timeout_s {SECONDS} a bool: True"),
    ({"on_oom": "pray"}, ConfigError, "on_oom='pray' is not one of retry, cpu, fail"),
    ({"gpus": 1}, TypeError, "no option 'gpus'; there are start_method, timeout_s"),
    ({"env": 3}, TypeError, "env must be a mapping of names to strings, not a int"),
    ({"env": {"A": None}}, ConfigError, "env maps names to strings, and A has a NoneType"),
]


@pytest.mark.parametrize(("given", "kind", "message"), BAD, ids=[str(given)[:60] for given, _, _ in BAD])
def test_bad_values_are_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call_settings(given)
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
        ("FLOWER_GPU_NUM_GPUS", "1.5", "FLOWER_GPU_NUM_GPUS must be a share of one GPU"),
        ("FLOWER_GPU_MEMORY", "2G", "FLOWER_GPU_MEMORY='2G' is not a memory size: G could mean GB or GiB"),
        ("FLOWER_GPU_PLACEMENT", "odd", "FLOWER_GPU_PLACEMENT='odd' is not one of spread, pack"),
        ("FLOWER_GPU_RESERVE", "much", "FLOWER_GPU_RESERVE='much' is not a memory size"),
        ("FLOWER_GPU_CONCURRENCY", "0", "FLOWER_GPU_CONCURRENCY must be a whole number, 1 or more, not '0'"),
    ],
)
def test_bad_values_in_the_environment_are_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        call_settings({})
    assert message in str(caught.value)


def test_variables_set_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "fork")
    monkeypatch.setenv("FLOWER_GPU_TIMEOUT_S", "12.5")
    monkeypatch.setenv("FLOWER_GPU_CLIENT", "7")
    monkeypatch.setenv("FLOWER_GPU_CONCURRENCY", "1000000")
    assert worker({}) == WorkerSettings("fork", 12.5, {}, "7", (), 1)


def test_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "no method")
    monkeypatch.setenv("FLOWER_GPU_CLIENT", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    env = {"OMP_NUM_THREADS": "2"}
    settings = worker({"start_method": "spawn", "timeout_s": 3, "env": env, "name": "8"})
    assert settings == WorkerSettings("spawn", 3, env, "8", (), 2)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    without = call_settings({})
    for name in ("OMP_NUM_THREADS", *VARIABLES):
        monkeypatch.setenv(name, "")
    assert call_settings({}) == without


def test_more_cores_than_the_host_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^num_cpus=1000000 is too much: .* at most"):
        call_settings({"num_cpus": 1_000_000})
    with pytest.raises(ConfigError, match=r"^--num-cpus 1000 is too much"):
        checked_environment({"num_cpus": 1000.0}, {})
    call_settings({"num_cpus": 1_000_000}, base={"FLOWER_GPU_CPU_LEASES": "off"})


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
    settings = worker({"env": env})
    env["A"] = "changed"
    assert settings.env["A"] == "b"
    with pytest.raises(TypeError):
        settings.env["A"] = "changed"  # type: ignore[index]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("task.train", "'task.train' does not name a function; write it as 'package.module:function'"),
        ("task:", "'package.module:function'"),
        ("task:train()", "'package.module:function'"),
        ("my-task:train", "'package.module:function'"),
        ("", "'package.module:function'"),
        (5, "a task is a function or a 'package.module:function' string, not int"),
    ],
)
def test_bad_tasks_are_refused(task: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_in_worker(task)
    assert message in str(caught.value)
