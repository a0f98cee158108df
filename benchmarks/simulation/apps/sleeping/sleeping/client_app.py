"""A client that sleeps for its size, and gives back what it got."""

import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"]
    seconds = float(context.run_config["sizes-s"].split()[partition])
    time.sleep(seconds)
    metrics = MetricRecord({"num-examples": 1 + round(1000 * seconds), "partition": float(partition)})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
