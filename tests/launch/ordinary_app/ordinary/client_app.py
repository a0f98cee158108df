"""A client that adds one to the model."""

import os
import signal
import sys
import time

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train."""
    print("started as", sys.argv[0])
    time.sleep(context.run_config["seconds"])
    if fails(context, "train-dies-on"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fails(context, "train-fails-on"):
        Nett()  # noqa: F821
    arrays = [array + 1 for array in message.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": 1, "train_loss": 0.5})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate."""
    if fails(context, "evaluate-fails-on"):
        raise NameError("name 'Nett' is not defined in im\udcffage.py")  # a name that is not UTF-8
    mean = float(message.content["arrays"].to_numpy_ndarrays()[0].mean())
    metrics = MetricRecord({"num-examples": 1, "eval_acc": mean / 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def fails(context: Context, key: str) -> bool:
    """Return True if this client is to fail."""
    return str(context.node_config["partition-id"]) in context.run_config[key].split()
