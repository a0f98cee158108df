"""Data, model, training and evaluation in ordinary PyTorch. Only workers import this module."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from sklearn.datasets import load_digits
from torch import nn

from flower_gpu import to_device

HELD_OUT = 360


def load_data():
    """Return images and labels of all digits, always in the same random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.from_numpy(images[order]).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels[order])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def initial_model(seed):
    torch.manual_seed(seed)
    return ArrayRecord(build_model().state_dict())


def train(message, context):
    """Train on this client's digits, starting from the model version in the message."""
    settings, node = context.run_config, context.node_config
    call = settings["seed"], message.content["config"]["server-round"], node["partition-id"]
    torch.manual_seed(int(np.random.SeedSequence(call).generate_state(1)[0]))
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model = to_device(model)
    mine = slice(HELD_OUT + node["partition-id"], None, node["num-partitions"])
    images, labels = to_device([part[mine] for part in load_data()])
    optimizer = torch.optim.SGD(model.parameters(), settings["learning-rate"])
    for _ in range(settings["local-epochs"]):
        for batch in torch.randperm(len(labels)).split(settings["batch-size"]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def evaluate(server_round, arrays):
    """Evaluate on the digits that are held out from all clients."""
    model = build_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    images, labels = to_device([part[:HELD_OUT] for part in load_data()])
    with torch.inference_mode():
        outputs = to_device(model)(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    return {"loss": nn.functional.cross_entropy(outputs, labels).item(), "accuracy": accuracy}
