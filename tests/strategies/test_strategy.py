"""Both strategies, with server-side evaluation in workers. The client proxies call real clients directly."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import flower_tasks
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server
from flwr.serverapp.strategy import FedAdam, Result
from streaming_grid import PlainTestGrid

from flower_gpu import FedAvg, GPUClient, LegacyFedAvg, gpu_evaluate
from flower_gpu.errors import ConfigError, InvalidResultError
from flower_gpu.strategies.strategy import mean_over_examples


def start(strategy: Any, evaluate_fn: Any, num_rounds: int = 2) -> Result:
    arrays = ArrayRecord({"w": Array(np.zeros((2, 2), np.float32))})
    return strategy.start(PlainTestGrid([1, 2, 3]), arrays, num_rounds=num_rounds, evaluate_fn=evaluate_fn)


@pytest.mark.parametrize("method", ["fork", "in-process"])
def test_server_side_evaluation_runs_in_workers(method: str) -> None:
    result = start(FedAvg(), gpu_evaluate("flower_tasks:evaluate_message", start_method=method))
    per_round = result.evaluate_metrics_serverapp
    assert list(per_round) == [0, 1, 2]
    assert per_round[2]["loss"] == pytest.approx(result.arrays["w"].numpy().mean())
    assert per_round[1]["per-class"] == [0.1, 0.2]
    assert result.evaluate_metrics_clientapp == {}
    pids = {record["pid"] for record in per_round.values()}
    assert len(pids) == (1 if method == "in-process" else 3)
    assert (os.getpid() in pids) == (method == "in-process")


def test_fedavg_wraps_a_function_and_other_strategies_accept_the_wrapped_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "fork")
    for strategy, evaluate in (
        (FedAvg(), flower_tasks.evaluate_message),
        (FedAdam(fraction_evaluate=0.0), gpu_evaluate(flower_tasks.evaluate_message)),
    ):
        result = start(strategy, evaluate, num_rounds=1)
        assert result.evaluate_metrics_serverapp[1]["pid"] != os.getpid()
    assert start(FedAvg(), lambda *_: None, num_rounds=1).evaluate_metrics_serverapp == {}


class DirectProxy(ClientProxy):
    """A proxy that calls a real GPUClient, as Flower's client side does, but without a network."""

    def __init__(self, cid: str, call: Callable[[Any], FitRes]) -> None:
        super().__init__(cid)
        self._call = call
        self.calls: list[str] = []

    def fit(self, ins: Any, timeout: Any, group_id: Any) -> FitRes:
        self.calls.append("fit")
        return self._call(ins)

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        self.calls.append("evaluate")
        raise AssertionError("clients must not be asked to evaluate")

    def get_parameters(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise AssertionError("the strategy has initial parameters")

    def get_properties(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise NotImplementedError

    def reconnect(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise NotImplementedError


def run_legacy(strategy: LegacyFedAvg, proxies: list[DirectProxy], num_rounds: int) -> tuple[Any, Server]:
    manager = SimpleClientManager()
    for proxy in proxies:
        manager.register(proxy)
    server = Server(client_manager=manager, strategy=strategy)
    history, _ = server.fit(num_rounds, timeout=None)
    return history, server


def legacy_weights() -> list[Any]:
    return [np.zeros((2, 2), np.float32), np.array(5, np.int64)]


@pytest.mark.parametrize(
    ("strategy", "flowers"),
    [(FedAvg, "flwr.serverapp.strategy.FedAvg"), (LegacyFedAvg, "flwr.server.strategy.FedAvg")],
)
def test_fraction_evaluate_is_refused(strategy: Any, flowers: str) -> None:
    strategy(fraction_evaluate=0.0)
    with pytest.raises(ConfigError, match=f"clients do not evaluate under this strategy.* use {flowers} "):
        strategy(fraction_evaluate=0.5)


def test_the_numpyclient_api_trains_and_evaluates() -> None:
    proxies = [
        DirectProxy(
            str(step),
            GPUClient("flower_tasks:add_one", kwargs={"step": step}, start_method="fork").to_client().fit,
        )
        for step in (1, 3)
    ]
    strategy = LegacyFedAvg(
        evaluate_fn=gpu_evaluate("flower_tasks:evaluate_legacy", kwargs={"scale": 2.0}, start_method="fork"),
        initial_parameters=legacy_weights(),
        num_rounds=2,
    )
    history, server = run_legacy(strategy, proxies, num_rounds=2)
    assert all(proxy.calls == ["fit", "fit"] for proxy in proxies)
    assert history.losses_centralized == [(0, 0.0), (1, 4.0), (2, 8.0)]
    assert history.losses_distributed == [] and history.metrics_distributed == {}
    assert history.metrics_distributed_fit["loss"] == [(1, 0.5), (2, 0.5)]
    pids = {pid for _, pid in history.metrics_centralized["pid"]}
    assert len(pids) == 3 and os.getpid() not in pids
    weights, batches = parameters_to_ndarrays(server.parameters)
    assert weights.dtype == np.float32 and weights[0, 0] == 4.0
    # Flower's in-place average multiplies integers by a factor cast to int, which gives 0.
    assert batches.dtype == np.int64 and batches == 9


def test_the_numpyclient_api_logs_why_clients_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "fork")

    def refuse(_: Any) -> FitRes:
        return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no GPU today"), ndarrays_to_parameters([]), 0, {})

    def crash(_: Any) -> FitRes:
        raise RuntimeError("connection lost")

    good = GPUClient("flower_tasks:add_one").to_client().fit
    strategy = LegacyFedAvg(
        evaluate_fn=flower_tasks.evaluate_legacy, initial_parameters=legacy_weights(), min_fit_clients=3
    )
    strategy.min_available_clients = 3
    proxies = [DirectProxy(name, call) for name, call in (("a", good), ("b", refuse), ("c", crash))]
    _, server = run_legacy(strategy, proxies, num_rounds=1)
    assert parameters_to_ndarrays(server.parameters)[0][0, 0] == 1.0
    assert "Client b failed in round 1: no GPU today" in caplog.text
    assert "A client failed in round 1: connection lost" in caplog.text


def fit_result(array: Any, num_examples: int) -> tuple[Any, FitRes]:
    parameters = ndarrays_to_parameters([np.asarray(array), np.ones(2, np.float32)])
    return DirectProxy("1", lambda ins: None), FitRes(Status(Code.OK, ""), parameters, num_examples, {})


@pytest.mark.parametrize(
    ("first", "second", "expected", "dtype"),
    [
        (np.array([1]), np.array([1.5]), [1.375], "float64"),
        (np.array([1.5], "f4"), np.array([1]), [1.125], "float64"),
        (np.array([1.5], "f2"), np.array([2.0], "f4"), [1.875], "float32"),
        (np.array([3], "u1"), np.array([300]), [226], "int64"),
        (np.array([True, False]), np.array([False, False]), [False, False], "bool"),
        (np.array(3), np.array(8), 7, "int64"),
        (np.asfortranarray(np.eye(2)), np.ones((2, 2)), [[1.0, 0.75], [0.75, 1.0]], "float64"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_the_mean_of_numpy_clients_is_right_for_mixed_dtypes(
    first: Any, second: Any, expected: Any, dtype: str, inplace: bool
) -> None:
    strategy = LegacyFedAvg()
    strategy.inplace = inplace  # an attribute of Flower's FedAvg that must have no effect
    parameters, _ = strategy.aggregate_fit(1, [fit_result(first, 1), fit_result(second, 3)], [])
    assert parameters is not None
    mean, other = parameters_to_ndarrays(parameters)
    assert (mean.dtype, mean.tolist()) == (np.dtype(dtype), expected)
    assert other.dtype == np.float32 and other.tolist() == [1, 1]


def test_averaging_holds_one_model_of_the_numpy_clients_at_a_time() -> None:
    """That is also true if the model has an integer counter, as with BatchNorm."""
    sent = ndarrays_to_parameters([np.ones(250_000, np.float32), np.array(7)])

    def peak_bytes(clients: int) -> int:
        results = [
            (DirectProxy(str(number), lambda ins: None), FitRes(Status(Code.OK, ""), sent, 1, {}))
            for number in range(clients)
        ]
        tracemalloc.start()
        try:
            parameters, _ = LegacyFedAvg().aggregate_fit(1, results, [])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            assert parameters is not None and parameters_to_ndarrays(parameters)[1] == 7

    peak_bytes(1)  # runs the imports of the first use
    assert peak_bytes(12) < peak_bytes(2) + 500_000, "less than half a model more"


def test_the_error_for_another_model_names_the_numpy_client() -> None:
    other = (
        DirectProxy("7", lambda ins: None),
        FitRes(Status(Code.OK, ""), ndarrays_to_parameters([]), 1, {}),
    )
    with pytest.raises(InvalidResultError, match="client 7 returned 0 arrays, and clients before it 2"):
        LegacyFedAvg().aggregate_fit(1, [fit_result(1.0, 1), other], [])
    with pytest.raises(ZeroDivisionError, match="how many examples"):
        LegacyFedAvg().aggregate_fit(1, [fit_result(1.0, 0)], [])


def test_the_mean_is_weighted_by_examples() -> None:
    metrics = [(10, {"loss": 1.0, "name": "a", "ok": True}), (30, {"loss": 2, "late": 0.5})]
    assert mean_over_examples(metrics) == {"loss": 1.75, "late": 0.5}
    assert mean_over_examples([(0, {"loss": 1.0})]) == {}
