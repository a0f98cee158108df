"""A client that sets and draws much before and after its vectorized function."""

import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import flower_gpu

app = ClientApp()
dropout = nn.Dropout(0.5)


def loss(weights: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return (data @ weights).square().mean()


@flower_gpu.vectorized
def step(weights: torch.Tensor, data: torch.Tensor, layer: str) -> dict[str, torch.Tensor]:
    data = dropout(data) if layer == "dropout" else data
    return {"weights": weights - 0.1 * torch.func.grad(loss)(weights, data), "loss": loss(weights, data)}


def seen() -> list[str]:
    """Return what is different for each client: what it draws, has set, and where it is."""
    drawn = random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1).item()
    return [
        *map(repr, drawn),
        os.environ.get("OF_A_CLIENT", ""),
        Path.cwd().name,
        str(torch.get_default_dtype()),
    ]


@app.train()
def train(message: Message, context: Context) -> Message:
    config, partition = message.content["config"], context.node_config["partition-id"]
    folder, server_round = Path(context.run_config["folder"]), config["server-round"]
    config["partition"] = partition  # a message's own, though all of a round have the same content
    [weights] = message.content["arrays"].to_numpy_ndarrays()
    facts = [seen()]
    os.environ["OF_A_CLIENT"] = str(partition)
    own = folder / f"client-{partition}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    if partition == 2:
        torch.set_default_dtype(torch.float64)
    times = context.state.setdefault("times", MetricRecord({"times": 0}))
    times["times"] += 1
    if partition == 3 and server_round == 2:
        raise ValueError("before the step")
    data = torch.arange(12.0 if partition != 5 else 24.0, dtype=torch.float32).reshape(-1, 3) / (
        10 + partition
    )
    weights += 0  # in place: nobody else has these
    result = step(torch.from_numpy(weights), data, context.run_config["layer"])
    weights -= 1
    facts.append(seen())
    if partition == 4 and server_round == 2:
        raise SystemExit("after the step")
    found = [*result["weights"].tolist(), result["loss"].item()]
    line = {
        "round": server_round,
        "client": partition,
        "facts": facts,
        "found": found,
        "times": times["times"],
    }
    print(f"client {config['partition']} is done")
    with (folder / "facts").open("a") as file:
        file.write(json.dumps(line) + "\n")
    metrics = MetricRecord({"num-examples": len(data)})
    arrays = ArrayRecord([result["weights"].numpy()])
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
