"""A client that gives back what it got, but for those that are to fail."""

import os
import signal
import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"]
    if partition % 3 == 0:
        raise ValueError(f"no data for partition {partition}")
    if partition == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if partition == 2:
        time.sleep(3600)
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
