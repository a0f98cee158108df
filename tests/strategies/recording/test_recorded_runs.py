"""Records of Flower's strategies and of users' own loops, and the files that a run leaves in its folder."""

from __future__ import annotations

import csv
import json
import math
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_rounds import round_state
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server import strategy as legacy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as flwr_strategies
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples
from recorded_apps import (
    CLIENTS,
    FAILS,
    Client,
    Clients,
    handled_by,
    initial_arrays,
    new_nodes,
    run_app,
    run_reported,
)
from safetensors.numpy import load_file

import flower_gpu.strategies.strategy as ours
from flower_gpu import gpu_evaluate, trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.strategies.evaluate import GPUEvaluate
from flower_gpu.strategies.model_file import model_sha256, write_model
from flower_gpu.strategies.strategy_state import OUR_FEDAVG
from flower_gpu.trace import Event
from flower_gpu.watch.history import History
from flower_gpu.watch.result import result_of, write_results

ROUNDS = 3


def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"accuracy": server_round / 10})


class OwnStart(FedAvg):
    """A strategy whose own loop never calls Flower's."""

    def start(self, grid, initial_arrays, rounds_of_mine=2, evaluate_fn=None, **rest):
        result = Result(arrays=initial_arrays)
        for server_round in range(1, rounds_of_mine + 1):
            messages = self.configure_train(server_round, result.arrays, ConfigRecord(), grid)
            replies = grid.send_and_receive(messages)
            result.arrays, metrics = self.aggregate_train(server_round, replies)
            result.train_metrics_clientapp[server_round] = metrics
            result.evaluate_metrics_serverapp[server_round] = evaluate_fn(server_round, result.arrays)
        return result


class Around(FedAvg):
    """A strategy that delegates all calls to another strategy."""

    def start(self, *args, **kwargs):
        return FedAvg().start(*args, **kwargs)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedMedian": flwr_strategies.FedMedian,
    "DifferentialPrivacyServerSideFixedClipping": lambda: (
        flwr_strategies.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 10.0, CLIENTS)
    ),
    "OwnStart": OwnStart,
    "Around": Around,
}


def summarize(events: list[Event]) -> list[str]:
    return [event["event"] for event in events if event["event"] != "reply"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_record_of_any_strategy_matches_its_result(name: str) -> None:
    # The strategy is created before the recording starts, as in a module of an app.
    strategy = STRATEGIES[name]()
    results: list[Result] = []
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})

    def main(grid: Any, context: Any) -> None:
        own = {"rounds_of_mine": ROUNDS} if name == "OwnStart" else {"num_rounds": ROUNDS}
        results.append(strategy.start(grid, initial_arrays=arrays, evaluate_fn=accuracy, **own))

    recorded = run_app(main)
    (result,) = results
    assert recorded.events[0]["event"] == "strategy_started"
    assert recorded.strategies() == [(name, None if name == "OwnStart" else ROUNDS)]
    assert recorded.metrics("train") == {
        server_round: dict(result.train_metrics_clientapp.get(server_round) or {})
        for server_round in range(1, ROUNDS + 1)
    }
    assert recorded.metrics("evaluate") == {
        server_round: dict(metrics) for server_round, metrics in result.evaluate_metrics_clientapp.items()
    }
    assert recorded.metrics("server-evaluate") == {
        server_round: dict(metrics) for server_round, metrics in result.evaluate_metrics_serverapp.items()
    }
    # With noise, a single failed reply makes the round void.
    if result.arrays:
        assert recorded.recorder.model is result.arrays
    else:
        assert recorded.recorder.model is arrays
    for phase in [*recorded.phases("train"), *recorded.phases("evaluate")]:
        assert (phase.clients, phase.failed, phase.messages) == (CLIENTS - 1, 1, CLIENTS)
    assert not recorded.of("round_grew"), "each phase is announced with its number of messages"
    assert {event.messages for event in recorded.of("round_started")} == {CLIENTS}
    # Partition and error of each message to the failing client.
    kinds = ["train"] if name == "OwnStart" else ["train", "evaluate"]
    assert [(entry.round, entry.task, entry.node, entry.error) for entry in recorded.failures()] == [
        (server_round, kind, FAILS, f"{kind} of client {FAILS}: ValueError: no data\nand more lines")
        for server_round in range(1, ROUNDS + 1)
        for kind in kinds
    ]


def test_events_come_in_the_order_of_a_round() -> None:
    recorded = run_app(lambda grid, context: FedAvg().start(grid, initial_arrays(), 1, evaluate_fn=accuracy))
    assert summarize(recorded.events) == [
        "strategy_started",
        # The server evaluates the initial model.
        "round_finished",
        *["round_started", "round_finished"] * 2,
        "round_finished",
        "strategy_finished",
    ]
    replies = recorded.of("reply")
    assert len(replies) == 2 * CLIENTS
    assert {event.node for event in replies} == set(range(CLIENTS))
    assert all(event.aggregated for event in replies)
    scores = {event.node: event.metrics.get("score") for event in replies if event.task == "train"}
    assert scores == {n: None if n == FAILS else float(n) for n in range(CLIENTS)}


def test_our_strategy_still_streams_when_recorded_and_reports_its_evaluation() -> None:
    nodes = new_nodes(60)
    clients = Clients(nodes)

    def main(grid: Any, context: Any) -> None:
        evaluate = gpu_evaluate(accuracy, start_method="in-process")
        ours.FedAvg().start(grid, initial_arrays(), 2, evaluate_fn=evaluate)

    recorded = run_app(main, clients, nodes)
    assert recorded.metrics("server-evaluate") == {n: {"accuracy": n / 10} for n in range(3)}
    assert len(recorded.phases("server-evaluate")) == 3, "each evaluation is reported once"
    assert all(phase.seconds is not None for phase in recorded.phases("server-evaluate"))
    assert [phase.clients for phase in recorded.phases("train")] == [59, 59]
    assert recorded.phases("evaluate") == []
    assert recorded.recorder.model["n"].numpy() == 2
    # Two threads, and twice as many unread replies. A list would keep 59 alive.
    assert clients.most_alive < 15


class LooksLater(FedAvg):
    """Reads the replies after Flower has summed them."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        seen = [reply.content["arrays"]["w"].numpy() for reply in replies if not reply.has_error()]
        assert len(seen) == MANY - 1
        return arrays, metrics


class LooksAtNone(FedAvg):
    """Leaves the model unchanged."""

    def aggregate_train(self, server_round, replies):
        return initial_arrays(), None


class OwnConfig(FedAvg):
    """Overrides a method that does not see replies."""

    def configure_train(self, server_round, arrays, config, grid):
        return super().configure_train(server_round, arrays, config, grid)


def own_metrics(contents: list[RecordDict], key: str) -> MetricRecord:
    """Read the arrays of the replies, as a user's aggregation may."""
    return MetricRecord({"largest": max(float(entry["arrays"]["w"].numpy().max()) for entry in contents)})


MANY = 40
# Bulyan needs at least 7 replies to allow one malicious client, and computes a minute for 40.
FEW = 7
TRAINING: Any = {"fraction_evaluate": 0.0}
SUMMED: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**TRAINING),
    "FedProx": lambda: flwr_strategies.FedProx(proximal_mu=0.1, **TRAINING),
    "FedAvgM": lambda: flwr_strategies.FedAvgM(server_learning_rate=0.5, server_momentum=0.9, **TRAINING),
    "FedAdam": lambda: flwr_strategies.FedAdam(eta=0.2, **TRAINING),
    "FedYogi": lambda: flwr_strategies.FedYogi(**TRAINING),
    "FedAdagrad": lambda: flwr_strategies.FedAdagrad(**TRAINING),
    "OwnConfig": lambda: OwnConfig(**TRAINING),
}
ALL_AT_ONCE: dict[str, Callable[[], Strategy]] = {
    "FedMedian": flwr_strategies.FedMedian,
    "FedTrimmedAvg": lambda: flwr_strategies.FedTrimmedAvg(beta=0.2),
    "Krum": lambda: flwr_strategies.Krum(num_malicious_nodes=2),
    "MultiKrum": lambda: flwr_strategies.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=3),
    "Bulyan": lambda: flwr_strategies.Bulyan(num_malicious_nodes=1),
    "DifferentialPrivacyClientSideFixedClipping": lambda: (
        flwr_strategies.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1e-9, 10.0, MANY)
    ),
    "LooksLater": LooksLater,
    "LooksAtNone": LooksAtNone,
    "own metrics": lambda: FedAvg(train_metrics_aggr_fn=own_metrics),
}


@pytest.mark.parametrize("name", [*SUMMED, *ALL_AT_ONCE])
def test_summing_replies_on_arrival_does_not_change_flowers_strategies(name: str) -> None:
    """Strategies that need all replies of a round get all of them."""
    results: list[Result] = []
    most_alive = []
    count = FEW if name == "Bulyan" else MANY
    for streams in (True, False):
        nodes = new_nodes(count)
        clients = Clients(nodes)

        def main(grid: Any, context: Any) -> None:
            strategy = {**SUMMED, **ALL_AT_ONCE}[name]()
            results.append(strategy.start(grid, initial_arrays(), 3))

        recorded = run_app(main, clients, nodes, streams=streams)
        assert [phase.messages for phase in recorded.phases("train")] == [count] * 3
        most_alive.append(clients.most_alive)
    streamed, plain = results
    # These choose among equal replies by their order.
    if "Krum" not in name and name != "Bulyan":
        for server_round, metrics in plain.train_metrics_clientapp.items():
            assert dict(streamed.train_metrics_clientapp[server_round]) == pytest.approx(dict(metrics))
    assert list(streamed.arrays) == list(plain.arrays)
    for key, array in streamed.arrays.items():
        assert array.dtype == plain.arrays[key].dtype
        np.testing.assert_allclose(array.numpy(), plain.arrays[key].numpy(), rtol=1e-6)
    # Two threads, and twice as many unread replies.
    assert (most_alive[0] < 15) == (name in SUMMED), most_alive
    assert most_alive[1] >= count - 1


def test_two_starts_in_an_app_are_recorded_as_two_runs() -> None:
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(fraction_evaluate=0.0)
        arrays = strategy.start(grid, initial_arrays(), num_rounds=1).arrays
        strategy.start(grid, arrays, num_rounds=2)

    recorded = run_app(main)
    assert recorded.strategies() == [("FedAvg", 1), ("FedAvg", 2)]
    assert [phase.round for phase in recorded.phases("train")] == [1, 1, 2]
    assert recorded.recorder.model["w"].numpy().tolist() == [3.0] * 3


class OwnServer(Server):
    """A legacy server that has its own rounds."""

    def fit(self, num_rounds, timeout):
        self.parameters = self._get_initial_parameters(0, timeout)
        for server_round in range(1, num_rounds + 1):
            self.parameters, _, _ = self.fit_round(server_round, timeout)
        return super().fit(0, timeout)


def scores_of(entries: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    scores = [metrics["score"] for _, metrics in entries]
    return {"score": sum(scores), "is_sorted": scores == sorted(scores)}


def legacy_parts() -> dict[str, Any]:
    strategy = legacy.FedAvg(
        min_fit_clients=CLIENTS,
        min_evaluate_clients=CLIENTS,
        min_available_clients=CLIENTS,
        evaluate_fn=lambda server_round, arrays, config: (0.1 * server_round, {"f1": np.float32(0.5)}),
        fit_metrics_aggregation_fn=scores_of,
    )
    return {"strategy": strategy, "config": ServerConfig(num_rounds=ROUNDS)}


def legacy_server(context: Any) -> ServerAppComponents:
    return ServerAppComponents(**legacy_parts())


def own_server(context: Any) -> ServerAppComponents:
    parts = legacy_parts()
    server = OwnServer(client_manager=SimpleClientManager(), strategy=parts["strategy"])
    return ServerAppComponents(server=server, config=parts["config"])


def workflow(grid: Any, context: Any) -> None:
    DefaultWorkflow()(grid, LegacyContext(context=context, **legacy_parts()))


def secure_workflow(grid: Any, context: Any) -> None:
    fit = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, clipping_range=20.0)
    DefaultWorkflow(fit_workflow=fit)(grid, LegacyContext(context=context, **legacy_parts()))


@pytest.mark.parametrize("name", ["server_fn", "own Server", "workflow", "SecAgg+"])
def test_a_legacy_server_is_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flwr.client.mod import secaggplus_mod

    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    app = {
        "server_fn": ServerApp(server_fn=legacy_server),
        "own Server": ServerApp(server_fn=own_server),
        "workflow": workflow,
        "SecAgg+": secure_workflow,
    }[name]
    nodes = new_nodes()
    client_app = ClientApp(
        client_fn=lambda context: Client(context.node_config["partition-id"]).to_client(),
        mods=[secaggplus_mod] if name == "SecAgg+" else [],
    )
    recorded = run_app(app, handled_by(client_app, nodes), nodes)
    assert recorded.strategies() == [("FedAvg", ROUNDS)]
    said = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert len(said) == 1 and "the state of flwr.server.strategy.fedavg.FedAvg is not known" in said[0]
    rounds = range(1, ROUNDS + 1)
    trained = recorded.phases("train")
    assert [phase.round for phase in trained] == list(rounds)
    assert {phase.clients for phase in trained} == {CLIENTS}
    assert {phase.messages for phase in trained} == {CLIENTS * (4 if name == "SecAgg+" else 1)}
    # The workflow of SecAgg+ has no metrics of clients.
    if name != "SecAgg+":
        assert recorded.metrics("train") == {number: {"score": 15.0, "is_sorted": True} for number in rounds}
    asked = recorded.phases("get_parameters")
    # Flower's Server sends no group id for round 0.
    assert asked[0].round in (None, 0)
    assert asked[0].clients == 1
    assert recorded.metrics("server-evaluate")[0] == {"loss": 0.0, "f1": 0.5}
    if name != "own Server":
        assert recorded.metrics("evaluate") == {
            number: {"loss": pytest.approx(number, abs=0.01)} for number in rounds
        }
        assert recorded.metrics("server-evaluate") == {
            number: {"loss": pytest.approx(0.1 * number), "f1": 0.5} for number in range(ROUNDS + 1)
        }
    model = recorded.recorder.model
    (weights,) = (
        [array.numpy() for array in model.values()]
        if isinstance(model, ArrayRecord)
        else parameters_to_ndarrays(model)
    )
    # The last step of the own Server asks for the initial parameters again.
    expected = 0 if name == "own Server" else ROUNDS
    np.testing.assert_allclose(weights, [expected] * 3, atol=0.01)


def messages_to_all(grid: Any, kind: str = "train", **metadata: str) -> list[Message]:
    content = RecordDict({"arrays": initial_arrays()})
    return [Message(content, node_id, kind, **metadata) for node_id in grid.get_node_ids()]


def test_an_own_loop_with_rounds_is_recorded_by_its_messages() -> None:
    def main(grid: Any, context: Any) -> None:
        for server_round in (1, 2):
            for message in messages_to_all(grid, group_id=str(server_round)):
                # Messages sent one at a time still form a single phase.
                list(grid.send_and_receive([message]))

    recorded = run_app(main)
    assert [
        (entry.round, entry.task, entry.clients, entry.failed) for entry in recorded.of("round_finished")
    ] == [
        (1, "train", CLIENTS - 1, 1),
        (2, "train", CLIENTS - 1, 1),
    ]
    metrics = {(entry.round, entry.node): dict(entry.metrics) for entry in recorded.of("reply")}
    assert metrics[2, 1] == {"num-examples": 1, "score": 1.0}
    assert metrics[2, FAILS] == {}


def test_an_own_loop_without_rounds_has_a_phase_for_each_send() -> None:
    def main(grid: Any, context: Any) -> None:
        for _ in range(2):
            list(grid.send_and_receive(messages_to_all(grid, "query.size")))

    recorded = run_app(main)
    assert [(entry.round, entry.task, entry.messages) for entry in recorded.of("round_finished")] == [
        (None, "query", CLIENTS)
    ] * 2


def test_pushed_messages_are_recorded_when_they_are_pulled() -> None:
    def main(grid: Any, context: Any) -> None:
        waiting = set(grid.push_messages(messages_to_all(grid, group_id="4")))
        while len(waiting) > 2:
            for reply in grid.pull_messages(list(waiting)[:1]):
                waiting.discard(reply.metadata.reply_to_message_id)

    recorded = run_app(main, Clients(new_nodes(), has_failing=False))
    (phase,) = recorded.of("round_finished")
    assert (phase.round, phase.clients, phase.failed, phase.messages) == (4, CLIENTS - 2, 2, CLIENTS)
    assert [entry.error for entry in recorded.failures()] == ["no reply was pulled"] * 2


def test_clients_that_do_not_reply_in_time_are_named() -> None:
    nodes = new_nodes()
    is_over = threading.Event()

    def handle(message: Message) -> Message:
        if nodes.partition_of(message.metadata.dst_node_id) == 5:
            is_over.wait(60)
        return clients(message)

    clients = Clients(nodes, has_failing=False)

    def main(grid: Any, context: Any) -> None:
        FedAvg(fraction_evaluate=0.0).start(grid, initial_arrays(), num_rounds=1, timeout=6)
        is_over.set()

    recorded = run_app(main, handle, nodes, threads=CLIENTS)
    assert [(entry.node, entry.error) for entry in recorded.failures()] == [(5, "no reply within 6 s")]
    (phase,) = recorded.phases("train")
    assert (phase.clients, phase.failed) == (CLIENTS - 1, 1)


CHANGED = (Strategy, legacy.Strategy, Server, DefaultWorkflow, GPUEvaluate, FedAvg)


def state_of_classes() -> list[Any]:
    return [dict(vars(entry)) for entry in CHANGED]


def test_classes_of_flower_are_restored_when_the_run_has_ended_or_failed() -> None:
    original = state_of_classes()

    def fails(grid: Any, context: Any) -> None:
        FedAvg(fraction_evaluate=0.0).start(grid, initial_arrays(), num_rounds=1)
        assert state_of_classes() != original
        raise RuntimeError("the app's own")

    with pytest.raises(RuntimeError, match="the app's own"):
        run_app(fails)
    assert state_of_classes() == original


def run_into(folder: RunFolder, main: Callable[..., Any], **options: Any) -> dict[str, Any]:
    nodes = new_nodes()
    report = run_reported(folder, main, Clients(nodes), nodes, facts={"workers_started": 4}, **options)
    assert json.loads(folder.result.read_text()) == report.summary
    return report.summary


def rows_of(folder: RunFolder) -> list[dict[str, str]]:
    with open(folder.metrics, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs")


def test_a_run_leaves_metrics_model_and_result(folder: RunFolder) -> None:
    result = run_into(
        folder, lambda grid, context: FedAvg().start(grid, initial_arrays(), 2, evaluate_fn=accuracy)
    )
    rows = rows_of(folder)
    assert list(rows[0]) == ["round", "kind", "accuracy", "score"]
    assert [(row["round"], row["kind"]) for row in rows] == [
        ("0", "server-evaluate"),
        *[(str(n), kind) for n in (1, 2) for kind in ("train", "evaluate", "server-evaluate")],
    ]
    score = pytest.approx(12 / 5)
    assert (rows[1]["accuracy"], float(rows[1]["score"]), rows[3]["accuracy"]) == ("", score, "0.1")

    model = load_file(folder.model)
    assert model["w"].tolist() == [2.0] * 3
    assert model["n"].shape == ()

    assert (result["kind"], result["app"], result["clients"]) == ("simulate", "app", CLIENTS)
    assert result["settings"] == {"seed": 3}
    assert (result["outcome"], result["error"]) == ("completed, 4 of 24 messages failed", None)
    assert (result["rounds_finished"], result["num_rounds"], result["strategy"]) == (2, 2, "FedAvg")
    assert (result["messages"], result["failed"], result["workers_started"]) == (4 * CLIENTS, 4, 4)
    assert result["model"] == folder.model.name and len(result["model_sha256"]) == 64
    (reason,) = result["failures"]
    assert (reason["reason"], reason["count"]) == ("ValueError: no data", 4)
    assert [(entry["client"], entry["type"], entry["round"]) for entry in reason["messages"]] == [
        (FAILS, kind, n) for n in (1, 2) for kind in ("train", "evaluate")
    ]
    assert result["metrics"] == {
        "server-evaluate": {"accuracy": 0.2},
        "train": {"score": score},
        "evaluate": {"score": score},
    }
    assert result["initial"]["accuracy"] == 0.0
    assert [(row["round"], row["accuracy"], row["messages"], row["failed"]) for row in result["rounds"]] == [
        (1, 0.1, 2 * CLIENTS, 2),
        (2, 0.2, 2 * CLIENTS, 2),
    ]
    assert {path.name for path in folder.path.iterdir()} == {
        *("failures.log", "metrics.csv", "model.safetensors", "result.json", "trace.jsonl")
    }


def test_rows_are_appended_to_the_table_of_rounds(folder: RunFolder) -> None:
    seen: list[tuple[int, bytes]] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if folder.metrics.exists():
            seen.append((folder.metrics.stat().st_ino, folder.metrics.read_bytes()))
        return MetricRecord({"accuracy": server_round / 10})

    def main(grid: Any, context: Any) -> None:
        FedAvg(fraction_evaluate=0.0).start(grid, initial_arrays(), num_rounds=6, evaluate_fn=evaluate)

    run_into(folder, main)
    # The first table has no column for the training metrics.
    after_first_round = seen[1:]
    assert len(after_first_round) >= 4 and len({inode for inode, _ in after_first_round}) == 1
    tables = [table for _, table in after_first_round] + [folder.metrics.read_bytes()]
    assert all(after.startswith(before) and after != before for before, after in pairwise(tables))


def test_an_own_loop_has_the_metrics_of_each_client_in_its_table(folder: RunFolder) -> None:
    result = run_into(
        folder, lambda grid, context: grid.send_and_receive(messages_to_all(grid, "train", group_id="1"))
    )
    replies = {event["node"]: event for event in trace.read(folder.trace) if event["event"] == "reply"}
    assert set(replies) == set(range(CLIENTS))
    assert replies[2]["metrics"] == {"num-examples": 1, "score": 2.0}
    assert replies[FAILS]["error"] == f"train of client {FAILS}: ValueError: no data"
    assert [row["kind"] for row in rows_of(folder)] == ["train"]
    assert result["model"] is None


def query_clients(grid: Any) -> None:
    """Send a query that belongs to no round: True is not round 1."""
    content = RecordDict({"config": ConfigRecord({"server-round": True})})
    list(grid.send_and_receive([Message(content, node, "query") for node in grid.get_node_ids()]))


@pytest.mark.parametrize("killed", [False, True])
def test_a_resumed_run_goes_on_in_the_same_files(killed: bool, folder: RunFolder) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)

    def start(grid: Any, context: Any) -> None:
        query_clients(grid)
        strategy.start(grid, initial_arrays(), 3)

    def resume(grid: Any, context: Any) -> None:
        query_clients(grid)
        grid._recorder.run_resumed(2)
        for server_round in (3, 4):
            messages = strategy.configure_train(server_round, initial_arrays(), ConfigRecord(), grid)
            strategy.aggregate_train(server_round, grid.send_and_receive(messages))

    run_into(folder, start)
    # The process was killed while it wrote.
    if killed:
        lines = folder.trace.read_bytes().splitlines(keepends=True)
        assert b'"run_finished"' in lines[-1]
        folder.trace.write_bytes(b"".join(lines[:-1]) + b'{"v": 1, "time": 1.0, "event": "round_fin')
    result = run_into(folder, resume, resumes=replace(round_state(2), strategy=OUR_FEDAVG))
    assert [row["round"] for row in rows_of(folder)] == ["1", "2", "", "3", "4"]
    assert (result["messages"], result["failed"], result["rounds_finished"]) == (5 * CLIENTS, 5, 4)
    (reason,) = result["failures"]
    assert [entry["round"] for entry in reason["messages"]] == [1, 2, None, 3, 4] and reason["count"] == 5
    assert result["messages_per_s"] == pytest.approx(3 * CLIENTS / result["seconds"], rel=0.1)


METRICS = st.dictionaries(
    st.text(max_size=5), st.floats() | st.integers() | st.lists(st.floats(), max_size=2), max_size=2
)


@example([(None, "train", {"\r": 0.0})])
@example([(2, "train", {}), (None, "train", {"kind": 1, "round": 2})])
@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 5), st.sampled_from(["train", "evaluate"]), METRICS),
        unique_by=lambda part: part[:2],
        max_size=8,
    )
)
def test_any_metrics_are_in_table_and_result(parts: list[tuple[int | None, str, dict[str, Any]]]) -> None:
    history = History()
    for number, task, metrics in parts:
        history.feed([trace.make("round_finished", round=number, task=task, metrics=metrics)])
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        write_results(folder, history.rounds.parts, result_of(history))
        result = json.loads(folder.result.read_text(), parse_constant=pytest.fail)
        assert len(result["rounds"]) == len({number for number, *_ in parts if number})
        rows = rows_of(folder) if parts else []
    assert [(row["round"], row["kind"]) for row in rows] == [
        ("" if number is None else str(number), task) for number, task, _ in parts
    ]
    for row, (_, _, metrics) in zip(rows, parts, strict=True):
        for name, value in metrics.items():
            key = f"{name} (metric)" if name in ("round", "kind") else name
            is_number = isinstance(value, int | float)
            assert (float(row[key]) == float(value) or math.isnan(value)) if is_number else row[key]


NAMES = st.sampled_from(["file", "layer.0/weight", "ünïcode", "__metadata__", "a b", "."]) | st.text(
    st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=8
)
TYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="<"),
    hnp.unsigned_integer_dtypes(endianness=">"),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64,)),
)
ARRAYS = hnp.arrays(TYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))


@settings(max_examples=examples(100))
@given(st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=3), st.booleans())
def test_a_written_model_can_be_read_back(arrays: dict[str, np.ndarray], is_transposed: bool) -> None:
    arrays = {name: array.T if is_transposed else array for name, array in arrays.items()}
    model = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.model.write_bytes(b"of the same run before it was resumed")
        is_written = write_model(model, folder) is not None
        # A safetensors file cannot hold complex numbers.
        assert is_written == all(
            array.dtype.kind in "biuf" and key != "__metadata__" for key, array in arrays.items()
        )
        assert is_written == folder.model.exists()
        loaded = load_file(folder.model) if is_written else arrays
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        assert loaded[key].dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(loaded[key], array)


@given(st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=3))
def test_the_sha256_of_a_model_depends_on_each_bit(arrays: dict[str, np.ndarray]) -> None:
    def digest_of(changed: dict[str, np.ndarray]) -> str | None:
        return model_sha256(ArrayRecord({name: Array(array) for name, array in changed.items()}))

    digest = digest_of(arrays)
    assert digest == digest_of(dict(reversed(arrays.items()))) and digest is not None
    assert digest == digest_of({name: np.array(array, order="F") for name, array in arrays.items()})
    name, array = next(iter(arrays.items()))
    others = [array[..., None], array.astype("complex128" if array.dtype != "complex128" else "bool")]
    if array.size:
        bits = array.copy().reshape(-1)
        bits.view(np.uint8)[0] ^= 1
        others.append(bits.reshape(array.shape))
    digests = {digest_of({**arrays, name: other}) for other in others}
    assert digest not in digests and len(digests) == len(others)
    assert digest_of({**arrays, f"{name}x": array}) != digest


def test_the_sha256_of_a_model_is_computed_as_documented(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ArrayRecord({"b": Array(np.ones((2, 3))), "a": Array(np.arange(4, dtype=np.int32))})
    write_model(model, folder)
    monkeypatch.chdir(folder.path)
    page = (Path(__file__).parents[3] / "docs" / "reference" / "result.md").read_text()
    section = page.partition("\n## The SHA-256 of a model\n")[2]
    exec(section.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.strip() == model_sha256(model)
    assert model_sha256(None) is None


def test_legacy_parameters_are_written_by_number(folder: RunFolder) -> None:
    write_model(ndarrays_to_parameters([np.ones(2), np.zeros((1, 2), np.int32)]), folder)
    loaded = load_file(folder.model)
    assert {name: array.tolist() for name, array in loaded.items()} == {"0": [1.0, 1.0], "1": [[0, 0]]}
    (folder.path / "other").touch()
    mode = folder.model.stat().st_mode
    assert mode == (folder.path / "other").stat().st_mode, "whoever may read the rest may read it"
