"""A client that misspells the name of the model, or misbehaves in some partitions."""

import os
import signal
import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


class Net:
    """A model."""


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the weights unchanged."""
    partition = context.node_config["partition-id"]
    if context.run_config["misspelt-for"] in ("all", str(partition)):
        Nett()  # noqa: F821
    if context.run_config["misspelt-for"] == "unruly":
        _misbehave(partition)
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


def _misbehave(partition: int) -> None:
    """Raise for every third partition, be killed as number 4, and hang as number 5."""
    if partition % 3 == 0:
        raise ValueError(f"no data in partition {partition}")
    if partition == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if partition == 5:
        time.sleep(1000)
