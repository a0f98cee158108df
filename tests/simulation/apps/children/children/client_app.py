"""Clients that start processes, each in a different way."""

import multiprocessing

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from children.squares import square

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Sum the first squares with two processes."""
    way = ("forkserver", "spawn")[context.node_config["partition-id"]]
    with multiprocessing.get_context(way).Pool(2) as pool:
        total = sum(pool.map(square, range(4)))
    metrics = MetricRecord({"num-examples": 1, "total": total})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
