"""A ClientApp that counts its calls in its module."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu import GPUOutOfMemoryError, WorkerDiedError, message_seed, train_many

calls = 0
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    global calls
    calls += 1
    config = message.content["config"]
    task = str(config["task"])
    if task == "hang":
        Path(str(config["file"])).touch()
        time.sleep(600)
    state = context.state.setdefault("seen", MetricRecord({"times": 0}))
    state["times"] += 1
    if task == "fail":
        raise ValueError("of the app")
    if task == "die once" and not Path(str(config["file"])).exists():
        Path(str(config["file"])).touch()
        task = "die"
    if task == "killed once" and not Path(str(config["file"])).exists():
        Path(str(config["file"])).touch()
        # The caller raises this error when the kernel has killed the worker.
        raise WorkerDiedError("killed for want of main memory", is_out_of_memory=True)
    if task == "die":
        os._exit(3)
    if task == "append":
        with Path(str(config["file"])).open("a") as file:
            file.write(f"{context.node_config['partition-id']}\n")
    drawn = random.random() + float(np.random.rand())
    arrays = [np.full(4, drawn, np.float64)]
    facts = {"pid": os.getpid(), "times": state["times"], "drawn": drawn}
    if task == "late torch":
        import torch

        facts["is_deterministic"] = int(torch.are_deterministic_algorithms_enabled())
        facts["seed"] = torch.initial_seed()
    if task == "answer":
        facts["calls"] = calls
    os.environ["OF_A_CLIENT"] = "1"
    os.chdir("/")
    return Message(
        RecordDict({"arrays": ArrayRecord(arrays), "facts": MetricRecord(facts)}), reply_to=message
    )


@train_many(app, "many")
def train_each(messages: list[Message], contexts: list[Context]) -> list[Message]:
    """Train each of several messages."""
    replies = []
    for message, context in zip(messages, contexts, strict=True):
        task = str(message.content["config"]["task"])
        if task == "too large" and len(messages) > 4:
            raise GPUOutOfMemoryError("no room for more than 4")
        # The caller raises this error when the kernel has killed the worker.
        if task == "killed" and len(messages) > 4:
            raise WorkerDiedError("killed for want of main memory", is_out_of_memory=True)
        if task == "refuse":
            replies.append(Message(Error(7, "no data"), reply_to=message))
            continue
        reply = train(message, context)
        reply.content["facts"]["together"] = len(messages)
        reply.content["facts"]["message_seed"] = message_seed(message)
        replies.append(reply)
    return replies


def content(task: str, file: str = "") -> RecordDict:
    return RecordDict({"config": ConfigRecord({"task": task, "file": file})})
