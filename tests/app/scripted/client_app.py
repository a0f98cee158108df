"""Clients that train as the run config says, and fail for the partitions that it names."""

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from scripted.squares import square

app = ClientApp()
kept: list[bytearray] = []


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train, and fail if the run config names this client."""
    config, partition = context.run_config, int(context.node_config["partition-id"])
    time.sleep(config["seconds"])
    if is_named(context, "dies-on"):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_named(context, "hangs-on"):
        time.sleep(1000)
    if is_named(context, "raises-on"):
        raise ValueError(f"no data in partition {partition}")
    ways = {"add": add, "add-one": add_one, "walk": walk, "pool": pool, "allocate": allocate}
    content = ways[config["train"]](message, context, partition)
    if is_named(context, "train-fails-on"):
        Nett()  # noqa: F821
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Report a quarter of the model's mean as its accuracy."""
    if is_named(context, "evaluate-fails-on"):
        raise NameError("name 'Nett' is not defined in im\udcffage.py")  # a name that is not UTF-8
    mean = float(message.content["arrays"].to_numpy_ndarrays()[0].mean())
    metrics = MetricRecord({"num-examples": 1, "eval_acc": mean / 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def is_named(context: Context, key: str) -> bool:
    """Return True if a value of the run config names this client."""
    return bool({"all", str(context.node_config["partition-id"])} & {*context.run_config[key].split()})


def add(message: Message, context: Context, partition: int) -> dict[str, object]:
    """Add a value by partition to the weights, and count the calls in the client's state."""
    assert partition < context.node_config["num-partitions"]
    print(f"partition {partition}\n" * 2, end="50 %\r100 %")
    counted = context.state.metric_records.get("calls", {"count": 0})["count"] + 1
    context.state["calls"] = MetricRecord({"count": counted})
    noise = np.random.default_rng(random.getrandbits(32)).random()
    weights = message.content["arrays"].to_numpy_ndarrays()
    arrays = ArrayRecord([array + np.float32(partition + noise) for array in weights])
    return {"arrays": arrays, "metrics": MetricRecord({"num-examples": partition + 1, "calls": counted})}


def add_one(message: Message, context: Context, partition: int) -> dict[str, object]:
    """Add one to the weights."""
    print("started as", sys.argv[0])
    arrays = ArrayRecord([array + 1 for array in message.content["arrays"].to_numpy_ndarrays()])
    return {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1, "train_loss": 0.5})}


def walk(message: Message, context: Context, partition: int) -> dict[str, object]:
    """Take a step that depends on partition, round and weights, and report the counter in the state."""
    steps = np.random.default_rng([message.content["config"]["server-round"], partition])
    count = context.state["calls"]["count"] + 1 if "calls" in context.state else 1
    context.state["calls"] = ConfigRecord({"count": count})
    arrays = {
        key: Array(np.asarray(0.9 * array.numpy() + steps.normal(size=array.shape), np.float32))
        for key, array in message.content["arrays"].items()
    }
    metrics = {"num-examples": 10 + partition, "calls": count, "mean": float(steps.normal())}
    return {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}


def pool(message: Message, context: Context, partition: int) -> dict[str, object]:
    """Sum the first squares with two processes, which each client starts in a different way."""
    with multiprocessing.get_context(("forkserver", "spawn")[partition]).Pool(2) as processes:
        total = sum(processes.map(square, range(4)))
    metrics = MetricRecord({"num-examples": 1, "total": total})
    return {"arrays": message.content["arrays"], "metrics": metrics}


def allocate(message: Message, context: Context, partition: int) -> dict[str, object]:
    """Take memory, wait for the other clients of the round, and keep the memory like a cache of data."""
    config = message.content["config"]
    taken = bytearray(b"x") * (int(config["mib"]) << 20)
    if config["keeps"]:
        kept.append(taken)
    begun = Path(str(config["folder"]))
    (begun / str(partition)).touch()
    while len(list(begun.iterdir())) < int(config["clients"]):
        time.sleep(0.02)
    return {"taken": MetricRecord({"mib": len(taken) >> 20})}
