"""A server that trains with the strategy of the run config, or sends messages of its own.

flower_gpu is imported in functions, so that a run with Flower's strategies is one of an app that does not
know flower_gpu.
"""

import json
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies

app = ServerApp()
KEPT_MIB, LARGE_MIB, LEFT_MIB = 300, 850, 400


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do what the run config says."""
    servers = {"rounds": rounds, "mixed": mixed, "allocate": allocate}
    servers[context.run_config["server"]](grid, context.run_config)


def rounds(grid: Grid, config: dict) -> None:
    """Run the rounds, and once more if the run pauses."""
    if config["sampling-seed"] >= 0:
        random.seed(config["sampling-seed"])
    run_rounds(grid, config)
    # Workers wait until the test lets the run continue.
    if config["pauses"]:
        while not Path(os.environ["LEASED_APP_GO_ON"]).exists():
            time.sleep(0.02)
        run_rounds(grid, config)


def run_rounds(grid: Grid, config: dict) -> None:
    """Run the rounds, and write the model to a file."""
    options = {"evaluate_fn": evaluate} if config["server-evaluates"] else {}
    initial = ArrayRecord(initial_weights(config))
    result = strategy_of(grid, config).start(grid, initial, config["num-server-rounds"], **options)
    if config["model"]:
        arrays = {key: array.numpy().tobytes().hex() for key, array in result.arrays.items()}
        means = {number: record["mean"] for number, record in result.train_metrics_clientapp.items()}
        Path(config["model"]).write_text(json.dumps([arrays, means]))


def strategy_of(grid: Grid, config: dict) -> strategies.Strategy:
    """Return the strategy of the run config."""
    sampled = {"fraction_train": config["fraction-train"], "min_available_nodes": config["min-nodes"]}
    if config["strategy"] in ("ours", "fedbuff"):
        import flower_gpu

        if config["strategy"] == "ours":
            return flower_gpu.FedAvg(**sampled, exact_order=config["exact-order"])
        return flower_gpu.FedBuff(buffer_size=3, concurrency=4)
    if config["strategy"] == "krum":
        return strategies.Krum(num_malicious_nodes=1)
    if config["strategy"] == "adaptive-dp":
        return strategies.DifferentialPrivacyServerSideAdaptiveClipping(
            strategies.FedAvg(), noise_multiplier=0.1, num_sampled_clients=len(list(grid.get_node_ids()))
        )
    kinds = {
        "fedavg": strategies.FedAvg,
        "fedadam": strategies.FedAdam,
        "median": strategies.FedMedian,
        "derived": Derived,
    }
    return kinds[config["strategy"]](**sampled, fraction_evaluate=config["fraction-evaluate"])


class Derived(strategies.FedAvg):
    """A strategy that may keep state that Flower does not know."""


def initial_weights(config: dict) -> list[np.ndarray] | dict:
    """Return the initial weights."""
    if config["weights"] == "normal":
        # Sums lose some of these 64 bits.
        return [np.random.default_rng(5).normal(size=(8, 32))]
    if config["weights"] == "two":
        return {"w": Array(np.zeros((3, 1000), np.float32)), "b": Array(np.ones((), np.float32))}
    if config["weights"] == "network":
        import torch

        from scripted.networks import NETWORKS

        torch.manual_seed(5)
        return NETWORKS[config["network"]]().state_dict()
    return [np.zeros(config["elements"], np.float32)]


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Report the model's mean."""
    return MetricRecord({"mean": float(np.mean(arrays.to_numpy_ndarrays()[0]))})


def mixed(grid: Grid, config: dict) -> None:
    """Send messages of which every second one is for the CPU."""
    arrays = ArrayRecord(initial_weights(config))
    contents = [ConfigRecord({"use-gpu": is_for_gpu}) for is_for_gpu in (True, False)]
    messages = [
        Message(RecordDict({"arrays": arrays, "config": contents[number % 2]}), node, "train")
        for number, node in enumerate(grid.get_node_ids())
    ]
    for reply in grid.send_and_receive(messages):
        assert not reply.has_error(), reply.error


def allocate(grid: Grid, config: dict) -> None:
    """Let all clients keep memory, limit the control group, and let a client take more memory.

    The limit leaves less memory for the large client than two small clients keep.
    """
    from flower_gpu import control_group

    nodes = sorted(grid.get_node_ids())
    assert taken(grid, nodes, KEPT_MIB, keeps=True) == [KEPT_MIB] * len(nodes)
    limit = control_group.memory_limit()
    assert limit is not None
    used_bytes = limit.total_bytes - limit.available_bytes
    Path(os.environ["LARGE_APP_LIMIT"]).write_text(str(used_bytes + (LEFT_MIB << 20)))
    print("taken:", taken(grid, nodes[:1], LARGE_MIB, keeps=False))


def taken(grid: Grid, nodes: list[int], mib: int, *, keeps: bool) -> list[object]:
    """Return the memory that each of the nodes took, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"mib": mib, "keeps": keeps, "clients": len(nodes), "folder": folder}
        messages = [Message(RecordDict({"config": ConfigRecord(config)}), node, "train") for node in nodes]
        replies = list(grid.send_and_receive(messages))
    return [reply.error.reason if reply.has_error() else reply.content["taken"]["mib"] for reply in replies]
