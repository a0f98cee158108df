"""A client that adds a value by partition to the weights, and counts its calls in its state."""

import random

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one step."""
    partition = int(context.node_config["partition-id"])
    assert partition < context.node_config["num-partitions"]
    print(f"partition {partition}\n" * 2, end="50 %\r100 %")
    counted = context.state.metric_records.get("calls", {"count": 0})["count"] + 1
    context.state["calls"] = MetricRecord({"count": counted})
    noise = np.random.default_rng(random.getrandbits(32)).random()
    arrays = [
        array + np.float32(partition + noise) for array in message.content["arrays"].to_numpy_ndarrays()
    ]
    metrics = MetricRecord({"num-examples": partition + 1, "calls": counted})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Report the mean of the model."""
    mean = float(np.mean(message.content["arrays"].to_numpy_ndarrays()[0]))
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "mean": mean})}), reply_to=message)
