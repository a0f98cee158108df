"""Both strategies against real clients; the Grid and the client proxies here call them directly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import flower_tasks
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu import FedAvg, GPUClient, LegacyFedAvg, gpu_evaluate
from flower_gpu.flower.strategy import mean_over_examples


class DirectGrid(Grid):
    """Three nodes; node i trains on 10 * i examples and adds i. Remembers what was asked of them."""

    run: Any = None

    def __init__(self, failing: Iterable[int] = ()) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.asked: list[str] = []
        self.failing = set(failing)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [1, 2, 3]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: Any = None) -> list[Message]:
        return [self._reply(message) for message in messages]

    def _reply(self, message: Message) -> Message:
        self.asked.append(message.metadata.message_type)
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = f"message-{len(self.asked)}"
        if node in self.failing:
            return Message(Error(code=1, reason="out of luck"), reply_to=message)
        arrays = {
            key: Array(np.asarray(array.numpy() + node, dtype=array.dtype))
            for key, array in message.content["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": 10 * node, "loss": 1.0 / node})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros((2, 2), np.float32)), "batches": Array(np.array(5, np.int64))})


EXPECTED = (10 * 1 + 20 * 2 + 30 * 3) / 60  # what a round adds to every weight


@pytest.mark.parametrize("method", ["fork", "in-process"])
def test_message_api_round_trip(method: str) -> None:
    grid = DirectGrid()
    evaluate = gpu_evaluate("flower_tasks:evaluate_message", start_method=method)
    result = FedAvg(min_train_nodes=3, min_available_nodes=3).start(
        grid, initial(), num_rounds=2, evaluate_fn=evaluate
    )
    assert set(grid.asked) == {"train"} and len(grid.asked) == 6
    assert np.allclose(result.arrays["w"].numpy(), 2 * EXPECTED)
    batches = result.arrays["batches"].numpy()
    assert batches.dtype == np.int64 and batches == round(round(5 + EXPECTED) + EXPECTED)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((10 / 1 + 20 / 2 + 30 / 3) / 60)
    per_round = result.evaluate_metrics_serverapp
    assert list(per_round) == [0, 1, 2] and per_round[2]["loss"] == pytest.approx(2 * EXPECTED)
    assert per_round[1]["per-class"] == [0.1, 0.2]
    pids = {record["pid"] for record in per_round.values()}
    assert len(pids) == (1 if method == "in-process" else 3)
    assert (os.getpid() in pids) == (method == "in-process")


def test_message_api_function_is_wrapped_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "fork")
    result = FedAvg(min_train_nodes=3).start(
        DirectGrid(), initial(), num_rounds=1, evaluate_fn=flower_tasks.evaluate_message
    )
    assert result.evaluate_metrics_serverapp[1]["pid"] != os.getpid()


def test_message_api_failing_client_does_not_stop_the_round() -> None:
    result = FedAvg(min_train_nodes=3).start(
        DirectGrid(failing=[3]), initial(), num_rounds=1, evaluate_fn=_no_result
    )
    assert np.allclose(result.arrays["w"].numpy(), (10 + 40) / 30)


def _no_result(server_round: int, arrays: ArrayRecord) -> None:
    return None


def test_other_strategies_take_the_isolated_evaluation() -> None:
    grid = DirectGrid()
    evaluate = gpu_evaluate(flower_tasks.evaluate_message, num_rounds=1, start_method="fork")
    strategy = FedAdam(fraction_evaluate=0.0, min_train_nodes=3)
    arrays = ArrayRecord({"w": Array(np.zeros((2, 2), np.float32))})
    result = strategy.start(grid, arrays, num_rounds=1, evaluate_fn=evaluate)
    assert result.evaluate_metrics_serverapp[1]["pid"] != os.getpid()


class DirectProxy(ClientProxy):
    """Calls a real GPUClient, as Flower's client side does, without a network."""

    def __init__(self, cid: str, call: Callable[[Any], FitRes]) -> None:
        super().__init__(cid)
        self._call = call
        self.asked: list[str] = []

    def fit(self, ins: Any, timeout: Any, group_id: Any) -> FitRes:
        self.asked.append("fit")
        return self._call(ins)

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        self.asked.append("evaluate")
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


def test_numpyclient_api_round_trip() -> None:
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
    assert all(proxy.asked == ["fit", "fit"] for proxy in proxies)
    assert history.losses_centralized == [(0, 0.0), (1, 4.0), (2, 8.0)]
    assert history.losses_distributed == [] and history.metrics_distributed == {}
    assert history.metrics_distributed_fit["loss"] == [(1, 0.5), (2, 0.5)]
    pids = {pid for _, pid in history.metrics_centralized["pid"]}
    assert len(pids) == 3 and os.getpid() not in pids
    weights, batches = parameters_to_ndarrays(server.parameters)
    assert weights.dtype == np.float32 and weights[0, 0] == 4.0
    # Flower's in-place average multiplies integers by a factor cast to int, which gives 0.
    assert batches.dtype == np.int64 and batches == 9


def test_numpyclient_api_logs_why_clients_failed(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: Any) -> FitRes:
        return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no GPU today"), ndarrays_to_parameters([]), 0, {})

    def crash(_: Any) -> FitRes:
        raise RuntimeError("connection lost")

    good = GPUClient("flower_tasks:add_one", start_method="fork").to_client().fit
    strategy = LegacyFedAvg(
        evaluate_fn=flower_tasks.evaluate_legacy, initial_parameters=legacy_weights(), min_fit_clients=3
    )
    strategy.min_available_clients = 3
    proxies = [DirectProxy(name, call) for name, call in (("a", good), ("b", refuse), ("c", crash))]
    _, server = run_legacy(strategy, proxies, num_rounds=1)
    assert parameters_to_ndarrays(server.parameters)[0][0, 0] == 1.0
    assert "Client b failed in round 1: no GPU today" in caplog.text
    assert "A client failed in round 1: connection lost" in caplog.text


def test_mean_is_over_examples() -> None:
    metrics = [(10, {"loss": 1.0, "name": "a", "ok": True}), (30, {"loss": 2, "late": 0.5})]
    assert mean_over_examples(metrics) == {"loss": 1.75, "late": 0.5}
    assert mean_over_examples([(0, {"loss": 1.0})]) == {}
