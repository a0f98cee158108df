from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flower_tasks
import numpy as np
import pytest
from flwr.common import Code, FitIns, GetParametersIns, ndarrays_to_parameters, parameters_to_ndarrays

from flower_gpu import (
    ConfigError,
    FlowerGPUError,
    GPUClient,
    InvalidResultError,
    WorkerDiedError,
    gpu_client,
    trace,
)

METHODS = ["forkserver", "in-process"]


def weights() -> list[Any]:
    return [np.zeros((2, 3), np.float32), np.ones(4, np.float64), np.array(5, np.int64)]


class Overriding(GPUClient):
    def __init__(self, step: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.step = step

    def fit_in_worker(self, weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
        return flower_tasks.add_one(weights, config, self.step)


@pytest.mark.parametrize(
    ("train_fn", "method"),
    [
        ("flower_tasks:add_one", "fork"),
        ("flower_tasks:add_one", "in-process"),
        (flower_tasks.add_one, "spawn"),
        (flower_tasks.add_one, "in-process"),
    ],
)
def test_each_fit_runs_in_a_new_process_and_returns_types_that_flower_accepts(
    train_fn: Any, method: str
) -> None:
    client = GPUClient(train_fn, kwargs={"step": 2.0}, start_method=method)
    pids = set()
    for server_round in range(2):
        result, num_examples, metrics = client.fit(weights(), {"round": server_round})
        assert [a.dtype for a in result] == [np.float32, np.float64, np.int64]
        assert result[0].tolist() == [[2.0] * 3] * 2 and result[2] == 7
        assert (num_examples, type(num_examples)) == (7, int)
        assert (metrics["loss"], type(metrics["loss"])) == (0.5, float)
        assert metrics["round"] == server_round
        pids.add(metrics["pid"])
    assert len(pids) == (1 if method == "in-process" else 2)
    assert (os.getpid() in pids) == (method == "in-process")


@pytest.mark.parametrize("method", ["fork", "in-process"])
def test_evaluate_runs_in_a_worker_and_returns_plain_floats(method: str) -> None:
    client = GPUClient(evaluate_fn="flower_tasks:mean", start_method=method)
    loss, num_examples, metrics = client.evaluate(weights(), {})
    assert (loss, num_examples, metrics) == (0.0, 5, {"accuracy": 0.25})
    assert type(loss) is float and type(metrics["accuracy"]) is float


def test_an_overridden_method_runs_in_a_worker() -> None:
    result, _, metrics = Overriding(3.0, start_method="forkserver").fit(weights(), {})
    assert result[0][0, 0] == 3.0 and metrics["pid"] != os.getpid()


@pytest.mark.parametrize(
    ("client_class", "method"),
    [("flower_tasks:ExistingClient", "fork"), (flower_tasks.ExistingClient, "forkserver")],
)
def test_an_existing_client_class_runs_in_workers_unchanged(client_class: Any, method: str) -> None:
    client = gpu_client(client_class, 4.0, partition=2, start_method=method)
    result, num_examples, metrics = client.fit(weights(), {})
    assert result[0][0, 0] == 4.0 and num_examples == 7 and metrics["pid"] != os.getpid()
    assert client.evaluate(weights(), {})[0] == 0.0
    assert client.get_parameters({})[0].tolist() == [[3.0, 3.0]] * 2
    properties = client.get_properties({})
    assert properties["partition"] == 2 and properties["pid"] != os.getpid()


# This script runs in a separate process: a process is not forked if the app has threads, and pytest has some.
CLIENT_APP = """
import sys
from functools import partial

import flower_tasks
import numpy as np

from flower_gpu import GPUClient, gpu_client

sys.argv[0] = "/some/where/flwr-clientapp"
for make, name in ((GPUClient, "add_one"), (partial(gpu_client, step=4.0), "ExistingClient")):
    for task in (f"flower_tasks:{name}", getattr(flower_tasks, name)):
        make(task).fit([np.zeros((2, 3), np.float32)], {})
"""


def test_in_a_clientapp_a_task_given_by_name_uses_the_fork_server(
    tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    env = {"FLOWER_GPU_RUN_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    run_script(CLIENT_APP, env=env)
    started = [
        event for event in trace.read(tmp_path / trace.FILE_NAME) if event["event"] == "worker_started"
    ]
    assert [event["start_method"] for event in started] == ["forkserver", "fork"] * 2


def test_the_client_offers_only_implemented_methods_to_the_server() -> None:
    ins = FitIns(ndarrays_to_parameters(weights()), {})
    assert (
        GPUClient(evaluate_fn="flower_tasks:mean").to_client().fit(ins).status.code
        == Code.FIT_NOT_IMPLEMENTED
    )
    hosted = gpu_client(flower_tasks.FitOnly, start_method="fork").to_client()
    assert hosted.fit(ins).status.code == Code.OK
    assert hosted.evaluate(ins).status.code == Code.EVALUATE_NOT_IMPLEMENTED
    code = hosted.get_parameters(GetParametersIns({})).status.code
    assert code == Code.GET_PARAMETERS_NOT_IMPLEMENTED


def test_a_client_class_given_by_name_reports_a_missing_method_from_the_worker() -> None:
    with pytest.raises(NotImplementedError, match="FitOnly does not implement evaluate"):
        gpu_client("flower_tasks:FitOnly", start_method="fork").evaluate(weights(), {})


@pytest.mark.parametrize(
    "initial", ["flower_tasks:initial", flower_tasks.initial, [np.full((2, 2), 3.0, np.float32)]]
)
def test_initial_weights_may_be_a_name_a_function_or_a_list(initial: Any) -> None:
    client = GPUClient("flower_tasks:add_one", initial_weights=initial, start_method="fork").to_client()
    res = client.get_parameters(GetParametersIns({}))
    assert parameters_to_ndarrays(res.parameters)[0].tolist() == [[3.0, 3.0]] * 2


def test_the_error_for_missing_initial_weights_names_the_ways_to_set_them() -> None:
    with pytest.raises(FlowerGPUError, match="initial_parameters, or this client initial_weights"):
        GPUClient("flower_tasks:add_one").get_parameters({})


@pytest.mark.parametrize("method", METHODS)
def test_the_error_for_weights_that_are_not_finite_names_the_array(method: str) -> None:
    client = GPUClient("flower_tasks:nan_weights", start_method=method)
    with pytest.raises(InvalidResultError, match=r"array 2 of 3 .*1 values that are not finite"):
        client.fit(weights(), {})


def test_a_mask_with_infinities_is_returned_unchanged() -> None:
    """Many models keep an attention mask with ``-inf`` in a buffer. It is no sign of divergence."""
    client = GPUClient(
        "flower_tasks:masked_weights", initial_weights="flower_tasks:initial_with_mask", start_method="fork"
    )
    initial = client.get_parameters({})
    trained, _, _ = client.fit(initial, {})
    assert trained[0].tolist() == [1.0, 1.0]
    assert np.array_equal(trained[1], np.triu(np.full((3, 3), -np.inf), 1))


def test_a_dead_worker_fails_only_its_own_call() -> None:
    client = GPUClient("flower_tasks:die", "flower_tasks:mean", start_method="forkserver", name="seven")
    with pytest.raises(WorkerDiedError, match=r"(?s)fit of client seven.*SIGKILL.*last words"):
        client.fit(weights(), {})
    assert client.evaluate(weights(), {})[1] == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPUClient("flower_tasks.add_one"), "package.module:function"),
        (lambda: GPUClient(7), "not int"),
        (lambda: GPUClient("flower_tasks:add_one", timeout_s=0), "number of seconds above 0"),
        (lambda: gpu_client(dict), "takes a NumPyClient class"),
    ],
)
def test_bad_arguments_are_refused_by_the_constructor(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
