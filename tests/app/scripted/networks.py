"""Small networks whose last layer is called ``last``."""

from collections import OrderedDict

from torch import nn


def mlp() -> nn.Module:
    return _network(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), inputs=4)


def cnn() -> nn.Module:
    return _network(nn.Conv2d(1, 2, 5), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), inputs=32)


def _network(*layers: nn.Module, inputs: int) -> nn.Module:
    first = OrderedDict((str(number), layer) for number, layer in enumerate(layers))
    return nn.Sequential(OrderedDict(first, last=nn.Linear(inputs, 3)))


NETWORKS = {"mlp": mlp, "cnn": cnn}
