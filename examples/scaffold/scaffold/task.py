"""Data, model and evaluation in ordinary PyTorch. Only workers import this module."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from flower_gpu import to_device, to_numpy

HELD_OUT = 360


def load_data():
    """Return images and labels of all digits, always in the same random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.from_numpy(images[order]).float() / 16, torch.from_numpy(labels[order])


def load_partition(partition_id, num_partitions):
    """Return the data of one client. The data is split by label, so each client has few of the ten digits."""
    images, labels = (part[HELD_OUT:] for part in load_data())
    mine = labels.argsort(stable=True).tensor_split(num_partitions)[partition_id]
    return images[mine], labels[mine]


def build_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def initial_weights(seed):
    torch.manual_seed(seed)
    return dict(to_numpy(build_model().state_dict()))


def evaluate(server_round, arrays):
    """Evaluate on the digits that are held out from all clients."""
    model = build_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    images, labels = to_device([part[:HELD_OUT] for part in load_data()])
    with torch.inference_mode():
        outputs = to_device(model)(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    return {"loss": nn.functional.cross_entropy(outputs, labels).item(), "accuracy": accuracy}
