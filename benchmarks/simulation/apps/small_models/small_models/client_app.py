"""A client that trains one model at a time, or several in one step if the environment says so."""

import os

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import flower_gpu

app = ClientApp()
#: Number of messages that the handler takes at once; 0: an ordinary handler, with ``backward()``.
MAX_MESSAGES = int(os.environ.get("SMALL_MODELS_MAX_MESSAGES", "64"))


def train_one(message: Message, context: Context) -> Message:
    from small_models import task

    config, client = message.content["config"], task.Client.of(message, context)
    trained = task.train_one(config["network"], client)
    return _reply(message, client.number, [value.numpy() for value in trained.values()], len(client.labels))


def train_many(messages: list[Message], contexts: list[Context]) -> list[Message]:
    from small_models import task

    clients = [task.Client.of(*each) for each in zip(messages, contexts, strict=True)]
    trained = task.train_many(messages[0].content["config"]["network"], clients)
    return [
        _reply(message, client.number, [value.numpy() for value in parameters.values()], len(client.labels))
        for message, client, parameters in zip(messages, clients, trained, strict=True)
    ]


def _reply(message: Message, partition: int, weights: list, count: int) -> Message:
    metrics = MetricRecord({"num-examples": count, "partition": float(partition)})
    return Message(RecordDict({"arrays": ArrayRecord(weights), "metrics": metrics}), reply_to=message)


if MAX_MESSAGES:
    flower_gpu.train_many(app, max_messages=MAX_MESSAGES)(train_many)
else:
    app.train()(train_one)
