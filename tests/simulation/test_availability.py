"""Clients that are unavailable in some rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp import strategy as flowers
from recorded_apps import RUN_ID, initial_arrays, run_app
from simulations import run

from flower_gpu.errors import ConfigError
from flower_gpu.simulation.clients import Clients
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.strategies.strategy import FedAvg

pytestmark = pytest.mark.timeout(200)

COUNT = 40


def nodes_of(table: dict[Any, Any], count: int = COUNT, seed: int = 7) -> VirtualNodes:
    return VirtualNodes(count, seed, RUN_ID, {}, Clients.of(table, count))


def test_each_client_is_available_in_its_fraction_of_the_rounds() -> None:
    table = {"*": {"availability": 0.5}, "0-9": {"availability": 0.1}, 20: {"availability": 0}}
    nodes, same, other = nodes_of(table), nodes_of(table), nodes_of(table, seed=8)
    rounds = [nodes.available(f"round {number}", None) for number in range(400)]
    assert rounds == [same.available(f"round {number}", None) for number in range(400)]
    others = [other.available(f"round {number}", None) for number in range(400)]
    assert [len(available) for available in rounds] != [len(available) for available in others]
    counts = [sum(node in available for available in rounds) for node in nodes.ids]
    assert all(10 < count < 80 for count in counts[:10]) and counts[20] == 0
    assert all(140 < count < 260 for count in (*counts[10:20], *counts[21:]))
    available = nodes.available("round 1", 25)
    assert len(available) >= 25 and list(available) == sorted(available, key=nodes.partition_of)


@pytest.mark.parametrize("strategy", [FedAvg, flowers.FedAvg])
def test_a_strategy_sees_the_available_clients_of_its_round(strategy: Any) -> None:
    nodes = nodes_of({"*": {"availability": 0.1}})

    def main(grid: Any, context: Any) -> None:
        strategy(min_train_nodes=4, min_available_nodes=4).start(grid, initial_arrays(), num_rounds=5)

    replies = run_app(main, nodes=nodes).of("reply")
    for number in range(1, 6):
        expected = {nodes.partition_of(node) for node in nodes.available(f"round {number}", 4)}
        asked = [reply for reply in replies if reply.round == number]
        trained = {reply.node for reply in asked if reply.task == "train"}
        assert trained <= expected and len(trained) >= 4
        assert {reply.node for reply in asked} <= expected


def test_waiting_for_clients_that_never_come_is_an_error() -> None:
    nodes = nodes_of({"*": {"availability": 0.5}, "1-3": {"availability": 0}}, 4)

    def main(grid: Any, context: Any) -> None:
        FedAvg().start(grid, initial_arrays(), num_rounds=1)

    with pytest.raises(ConfigError, match=r"waits for 2 clients in round 1, .* at most 1 of 4 were"):
        run_app(main, nodes=nodes)


def test_a_resumed_run_has_the_same_clients_in_each_round(tmp_path: Path) -> None:
    table = tmp_path / "devices.toml"
    table.write_text('["*"]\navailability = 0.5\n[1]\nnum-cpus = 0.5\n')
    options = ("--seed", "5", "--clients-table", str(table), "--run-config")
    whole = run("plain", 6, tmp_path / "whole", *options, "num-server-rounds=4")
    first = run("plain", 6, tmp_path / "first", *options, "num-server-rounds=2")
    assert whole.status == first.status == 0, whole.output + first.output
    resume = ("--resume", str(first.folder), "--run-config", "num-server-rounds=4")
    table.write_text('["*"]\navailability = 0.6\n')
    other = run("plain", 6, tmp_path / "first", *resume, "--clients-table", str(table))
    assert other.status == 2 and 'availability was [["*", 0.5]] and is [["*", 0.6]]' in other.output
    rest = run("plain", 6, tmp_path / "first", *resume)
    assert rest.status == 0 and rest.summary["model_sha256"] == whole.summary["model_sha256"]
    clients = [[part.messages for part in done.parts("train")] for done in (whole, rest)]
    assert clients[0] == clients[1] and min(clients[0]) < 6
