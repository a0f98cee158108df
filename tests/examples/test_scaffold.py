"""examples/scaffold: the algorithm step by step, and as a federation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from launched import REPOSITORY, SIMULATE, Launch

APP = REPOSITORY / "examples" / "scaffold"

sys.path.insert(0, str(APP))

CLIENTS = 4
CONFIG = {"local-steps": 50, "batch-size": 32, "learning-rate": 0.2, "client-momentum": 0.0, "seed": 1}


@pytest.fixture(autouse=True)
def _as_in_a_flower_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global server_app, task, training
    # This import takes seconds, which would also delay the mere collection of tests.
    from scaffold import server_app, task, training

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    threads = torch.get_num_threads()
    # One thread is faster for these small models.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class LocalGrid:
    """A grid that runs all clients in this process one after the other, with the states that Flower keeps."""

    def __init__(self, **config: float) -> None:
        config_and_more = {**CONFIG, **{name.replace("_", "-"): value for name, value in config.items()}}
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node, "num-partitions": CLIENTS},
                state=RecordDict(),
                run_config=config_and_more,
            )
            for node in range(CLIENTS)
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: list[Message], timeout: float | None = None) -> list[Message]:
        return [training.train(message, self.contexts[message.metadata.dst_node_id]) for message in messages]


def run(
    strategy: server_app.FedAvg, rounds: int, **config: float
) -> tuple[LocalGrid, dict[str, torch.Tensor]]:
    grid = LocalGrid(**config)
    initial = server_app.record(task.initial_weights(seed=1))
    result = strategy.start(grid, initial, num_rounds=rounds)
    return grid, result.arrays.to_torch_state_dict()


def accuracy(weights: dict[str, torch.Tensor]) -> float:
    return float(task.evaluate(0, ArrayRecord(weights))["accuracy"])


def test_the_servers_control_variate_is_the_mean_over_all_clients() -> None:
    """The mean includes clients that were not sampled in a round."""
    per_round, momentum = 2, 0.9
    strategy = server_app.Scaffold(CLIENTS, fraction_train=per_round / CLIENTS, min_train_nodes=per_round)
    grid, _ = run(strategy, 3, client_momentum=momentum)
    states = [context.state for context in grid.contexts.values()]
    trained = [state["rounds"]["trained"] if "rounds" in state else 0 for state in states]
    assert sum(trained) == 3 * per_round
    for name, array in strategy.control.items():
        kept = [state["control"][name].numpy() for state in states if "control" in state]
        assert any(np.abs(array).max() > 1e-4 for array in kept)
        np.testing.assert_allclose(array, sum(kept) / CLIENTS, rtol=0, atol=1e-6)


def test_scaffold_beats_fedavg_if_clients_differ_strongly() -> None:
    _, weights = run(server_app.Scaffold(CLIENTS, min_train_nodes=CLIENTS), 6)
    _, of_fedavg = run(server_app.FedAvg(weighted_by_key="weight", min_train_nodes=CLIENTS), 6)
    assert accuracy(weights) > 0.85
    assert 0.5 < accuracy(of_fedavg) < accuracy(weights) - 0.05


@pytest.mark.timeout(600)
def test_the_state_of_clients_survives_their_workers_from_round_to_round(launch: Launch) -> None:
    options = ("--num-supernodes", "3", "--run-config", "num-server-rounds=2 client-momentum=0.9")
    done = launch(APP, *options, command=SIMULATE, timeout_s=500)
    assert done.code == 0, done.output + done.logs()
    metrics = done.result["rounds"][-1]["metrics"]["server-evaluate"]
    assert metrics["accuracy"] > 0.4, "each client has data of at most four of the ten digits"

    log = done.output
    assert "rounds that clients trained, by what they kept: [2, 2, 2]" in log
    largest, apart = re.search(r"server's largest ([\d.]+), clients' mean differs by (\S+)", log).groups()
    assert float(apart) < 1e-6 < 1e-3 < float(largest)

    workers = [(event["client"], event["task"]) for event in done.events("worker_started")]
    assert sorted(workers) == sorted(
        [(client, "train") for client in "012"] * 2
        + [(client, "query") for client in "012"]
        + [("server", "evaluate")] * 3
        + [("server", "scaffold.task:initial_weights")]
    )
