"""The client. One function trains the models of several messages together."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import flower_gpu
from many_clients import task

app = ClientApp()


@flower_gpu.train_many(app, max_messages=64)
def train(messages: list[Message], contexts: list[Context]) -> list[Message]:
    config = contexts[0].run_config
    models = [message.content["arrays"].to_torch_state_dict() for message in messages]
    data = [load(message, context) for message, context in zip(messages, contexts, strict=True)]
    trained = task.train_many(config["network"], models, data, config["learning-rate"])
    return [
        reply(message, model, len(labels))
        for message, model, (_, labels) in zip(messages, trained, data, strict=True)
    ]


def load(message: Message, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the client's images and labels, shuffled by a generator that depends only on this message."""
    node = context.node_config
    images, labels = task.load_partition(node["partition-id"], node["num-partitions"])
    generator = torch.Generator().manual_seed(flower_gpu.message_seed(message))
    order = torch.randperm(len(labels), generator=generator)
    return images[order], labels[order]


def reply(message: Message, model: dict[str, torch.Tensor], num_examples: int) -> Message:
    metrics = MetricRecord({"num-examples": num_examples})
    return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=message)
