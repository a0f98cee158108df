"""A client whose bits depend on threads, hashes, generators, its state, and the sample of clients."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one step."""
    partition = int(context.node_config["partition-id"])
    _die(str(context.run_config["dies-once"]), partition)
    _wait(str(context.run_config["waits-for"]), int(message.content["config"]["server-round"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = torch.tensor(message.content["arrays"].to_numpy_ndarrays()[0]).to(device)
    drawn = torch.randn(200_000) * random.random() + float(np.random.rand())
    # The sum has as many parts as there are threads.
    scale = float(drawn.sum())
    # The order depends on hashes.
    for word in {f"word {number}" for number in range(9)}:
        scale = (scale + len(word) / 7 + int(word[-1]) / 3) / 1.1
    if context.run_config["operation"] == "put":
        weights.put_(torch.tensor([0, 0]).to(device), torch.tensor([1.0, 2.0]).to(weights))
    previous = context.state.array_records.get("before")
    momentum = previous.to_numpy_ndarrays()[0] if previous is not None else 0
    change = (weights @ weights.T @ weights * scale * 1e-7).cpu().numpy() + 0.5 * momentum
    context.state["before"] = ArrayRecord([change])
    return Message(
        RecordDict(
            {
                "arrays": ArrayRecord([weights.cpu().numpy() - change]),
                "metrics": MetricRecord({"num-examples": 1 + partition * 7, "scale": scale}),
            }
        ),
        reply_to=message,
    )


def _die(file: str, partition: int) -> None:
    """The first client that finds no such file is killed, as the kernel does when memory runs out."""
    if file and partition == 1 and not Path(file).exists():
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(folder: str, server_round: int) -> None:
    """Wait for the round's file in a folder, so that a test can act before the end of a run."""
    while folder and not Path(folder, str(server_round)).exists():
        time.sleep(0.01)
