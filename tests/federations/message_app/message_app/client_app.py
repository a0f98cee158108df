"""Plain Flower: adds 1 on partition-id + 1 examples. An evaluate function that must not be called."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    arrays = {key: Array(np.asarray(value.numpy() + 1)) for key, value in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": context.node_config["partition-id"] + 1})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    raise RuntimeError("a client was asked to evaluate")
