"""A client that gives back what it got, and one in three of which does not."""

import os
import signal
import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"]
    failure = context.run_config["failure"]
    if failure == "raise" and partition % 3 == 0:
        raise ValueError(f"no data for partition {partition}")
    if failure == "kill" and partition == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "hang" and partition == 2:
        time.sleep(3600)
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
