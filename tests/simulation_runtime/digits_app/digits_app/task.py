"""A small model of the digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def initial_state():
    torch.manual_seed(1)
    return build_model().state_dict()


def train(state, partition, partitions, seed):
    """Train for one epoch on every ``partitions``-th image. Return the weights and the number of images."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[partition::partitions] / 16, dtype=torch.float32)
    labels = torch.tensor(labels[partition::partitions])
    torch.manual_seed(seed)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = build_model().to(device)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randperm(len(images)).split(16):
        loss = nn.functional.cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}, len(images)
