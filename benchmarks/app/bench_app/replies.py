"""Replies of all clients. Imports no torch."""

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

Train = Callable[[list[Any], int, int, Any], tuple[list[Any], int]]


def reply_to(message: Message, context: Context, arrays: ArrayRecord, num_examples: int) -> Message:
    """Return a reply with a model. The number of the partition lets the server check who replied."""
    metrics = {"num-examples": num_examples, "partition": float(context.node_config["partition-id"])}
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


def client_app(train: Train) -> ClientApp:
    """Return a ClientApp that trains with ``train(weights, partition, server_round, config)``."""
    app = ClientApp()

    @app.train()
    def handle(message: Message, context: Context) -> Message:
        config = message.content["config"]
        weights = message.content["arrays"].to_numpy_ndarrays()
        partition = int(context.node_config["partition-id"])
        trained, count = train(weights, partition, config["server-round"], config)
        return reply_to(message, context, ArrayRecord(trained), count)

    return app
