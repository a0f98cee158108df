"""Functions of a ClientApp that run in several ranks."""

from __future__ import annotations

import os

from flwr.app import Context, Message, MetricRecord, RecordDict
from mod_messages import answer

from flower_gpu import distributed
from flower_gpu.pytorch.distributed import rank, world_size


@distributed(num_gpus=2)
def train(msg: Message, context: Context) -> Message:
    """Reply with metrics that differ from rank to rank; count the calls in the state."""
    before = context.state.get("calls", MetricRecord({"number": 0}))
    context.state["calls"] = MetricRecord({"number": before["number"] + 1, "rank": rank()})
    reply = answer(msg, pid=os.getpid(), world=world_size(), rank=rank())
    reply.content["metrics"] = MetricRecord(
        {"num-examples": 5, "loss": float(rank()), "epochs": 3, "of-each": [1.0, 2.0]}
    )
    return reply


@distributed(num_gpus=2)
def wrong(msg: Message, context: Context) -> Message:
    """Reply with another number of examples in each rank, and with another state."""
    context.state["calls"] = MetricRecord({"number": -1})
    content = RecordDict({"metrics": MetricRecord({"num-examples": 5 + rank()})})
    return Message(content, reply_to=msg)
