"""A client that sleeps for its size, and gives back what it got."""

import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from sleeping.sizes import sizes_s

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition, clients = context.node_config["partition-id"], context.node_config["num-partitions"]
    seconds = sizes_s(clients, context.run_config)[partition]
    time.sleep(seconds)
    metrics = MetricRecord({"num-examples": 1 + round(1000 * seconds), "partition": float(partition)})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
