"""A client with updates that depend on partition, round and model. It reports the counter in its state."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    time.sleep(context.run_config["seconds"])
    server_round, partition = message.content["config"]["server-round"], context.node_config["partition-id"]
    steps = np.random.default_rng([server_round, partition])
    count = context.state["calls"]["count"] + 1 if "calls" in context.state else 1
    context.state["calls"] = ConfigRecord({"count": count})
    arrays = {
        key: Array(np.asarray(0.9 * array.numpy() + steps.normal(size=array.shape), np.float32))
        for key, array in message.content["arrays"].items()
    }
    metrics = {"num-examples": 10 + partition, "calls": count, "mean": float(steps.normal())}
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
