"""Data, model, training and evaluation in ordinary PyTorch. Only workers import this module."""

import numpy as np
import torch
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flower_gpu import device, to_device
from flower_gpu.pytorch.weights import get_weights, set_weights

HELD_OUT = 360


def load_data():
    """Return images and labels of all digits, always in the same random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.from_numpy(images[order]).float() / 16, torch.from_numpy(labels[order])


def load_partition(partition_id, num_partitions):
    """Return the data of one client. All clients have the same number of examples, as the noise assumes."""
    images, labels = (part[HELD_OUT:] for part in load_data())
    size = len(labels) // num_partitions
    mine = slice(partition_id * size, (partition_id + 1) * size)
    return TensorDataset(images[mine], labels[mine])


def build_model(weights):
    model = nn.Linear(64, 10)
    set_weights(model, [array.astype(np.float32) for array in weights])  # SecAgg+ converts them to float64
    return model.to(device())


class Client(NumPyClient):
    """An ordinary NumPyClient, without any code for clipping, masks or workers."""

    def __init__(self, settings):
        self.settings = settings

    def fit(self, parameters, config):
        settings = self.settings
        call = settings["seed"], config["server-round"], settings["partition-id"]
        torch.manual_seed(int(np.random.SeedSequence(call).generate_state(1)[0]))
        data = load_partition(settings["partition-id"], settings["num-partitions"])
        model = build_model(parameters)
        optimizer = torch.optim.SGD(model.parameters(), settings["learning-rate"])
        for _ in range(settings["local-epochs"]):
            for images, labels in DataLoader(data, settings["batch-size"], shuffle=True):
                loss = nn.functional.cross_entropy(model(images.to(device())), labels.to(device()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        # Metrics would be sent without noise and without a mask, so there are none.
        return get_weights(model), len(data), {}


def evaluate(server_round, weights, config):
    """Evaluate on the digits that are held out from all clients."""
    images, labels = to_device([part[:HELD_OUT] for part in load_data()])
    with torch.inference_mode():
        outputs = build_model(weights)(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    return {"loss": nn.functional.cross_entropy(outputs, labels).item(), "accuracy": accuracy}
