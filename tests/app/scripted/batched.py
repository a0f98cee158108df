"""Clients of three sizes, each with its own last layer. Several of them train in a single step."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.func import functional_call, grad, vmap

import flower_gpu
from flower_gpu.pytorch import group_alike, stack, unstack
from scripted.networks import NETWORKS

app = ClientApp()
# Sizes of the clients' data
SIZES = 4, 7, 12


@flower_gpu.train_many(app)
def train(messages: list[Message], contexts: list[Context]) -> list[Message]:
    network = NETWORKS[str(contexts[0].run_config["network"])]()
    states = [start(message, context) for message, context in zip(messages, contexts, strict=True)]
    data = [load(message, context) for message, context in zip(messages, contexts, strict=True)]
    if any(is_asked(message, context, "raise") for message, context in zip(messages, contexts, strict=True)):
        raise ValueError("of the app")
    step = vmap(step_of(network))
    trained: dict[int, dict[str, torch.Tensor]] = {}
    for group in group_alike(data):
        stepped = step(stack([states[place] for place in group]), *stack([data[place] for place in group]))
        trained |= zip(group, unstack(stepped), strict=True)
    return [
        reply(messages[place], contexts[place], trained[place], len(messages))
        for place in range(len(messages))
    ]


def is_asked(message: Message, context: Context, option: str) -> bool:
    config, server_round = context.run_config, message.content["config"]["server-round"]
    return server_round == 2 and context.node_config["partition-id"] == config[option]


def start(message: Message, context: Context) -> dict[str, torch.Tensor]:
    """Return the server's layers together with the client's own last layer."""
    state = message.content["arrays"].to_torch_state_dict()
    if "own" in context.state:
        state |= context.state["own"].to_torch_state_dict()
    return state


def load(message: Message, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the client's data in an order that depends on the seed of the message."""
    partition = int(context.node_config["partition-id"])
    size = SIZES[partition % 3]
    generator = torch.Generator().manual_seed(partition)
    images = torch.rand(size, 1, 8, 8, generator=generator)
    labels = torch.randint(3, (size,), generator=generator)
    generator.manual_seed(flower_gpu.message_seed(message))
    half = torch.randperm(size, generator=generator)[: size // 2]
    return images[half], labels[half]


def step_of(network: nn.Module):
    trained = {name for name, _ in network.named_parameters()}

    def loss(parameters, buffers, images, labels):
        outputs = functional_call(network, (parameters, buffers), (images,))
        return nn.functional.cross_entropy(outputs, labels), buffers

    def step(state, images, labels):
        parameters = {name: value for name, value in state.items() if name in trained}
        buffers = {name: value for name, value in state.items() if name not in trained}
        gradients, buffers = grad(loss, has_aux=True)(parameters, buffers, images, labels)
        return {name: value - 0.1 * gradients[name] for name, value in parameters.items()} | buffers

    return step


def reply(message: Message, context: Context, state: dict[str, torch.Tensor], together: int) -> Message:
    times = context.state.setdefault("times", MetricRecord({"times": 0}))
    times["times"] += 1
    last = [name for name in state if name.startswith("last.")]
    context.state["own"] = ArrayRecord({name: state[name] for name in last})
    line = {
        "round": message.content["config"]["server-round"],
        "client": context.node_config["partition-id"],
        "together": together,
        "seed": flower_gpu.message_seed(message),
        "times": times["times"],
        "weights": [value for name in state for value in state[name].double().flatten().tolist()],
    }
    with (Path(str(context.run_config["folder"])) / "facts").open("a") as file:
        file.write(json.dumps(line) + "\n")
    if is_asked(message, context, "refuse"):
        return Message(Error(7, "no data"), reply_to=message)
    content = {
        "arrays": ArrayRecord(state),
        "metrics": MetricRecord({"num-examples": 1}),
        "config": ConfigRecord({}),
    }
    return Message(RecordDict(content), reply_to=message)
