"""A client that raises for every third partition, kills itself as number 4 and hangs as number 5."""

import os
import signal
import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the weights as they are, if at all."""
    partition = context.node_config["partition-id"]
    if partition % 3 == 0:
        raise ValueError(f"no data in partition {partition}")
    if partition == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if partition == 5:
        time.sleep(1000)
    metrics = MetricRecord({"num-examples": 1, "partition": partition})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
