"""Networks, and their training by SGD."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

#: Channels of the input and of both convolutions, pixels of a side, and units of a hidden layer.
_CNNS = {
    "cnn": (1, 16, 32, 8, 0),
    "wide-cnn": (1, 64, 128, 8, 0),
    "image-cnn": (3, 32, 64, 32, 0),
    "digits-cnn": (1, 16, 32, 8, 64),
    "cifar-cnn": (3, 16, 32, 32, 64),
}


def build(name: str) -> nn.Module:
    """Return a new network."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    colors, first, second, side, hidden = _CNNS[name]
    flat = (side // 4) ** 2 * second
    head = [nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, 10)] if hidden else [nn.Linear(flat, 10)]
    return nn.Sequential(
        nn.Conv2d(colors, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *head,
    )


def load(model: nn.Module, weights: Sequence[Any]) -> nn.Module:
    """Copy weights into a model and return the model."""
    names = model.state_dict().keys()
    model.load_state_dict({name: torch.tensor(value) for name, value in zip(names, weights, strict=True)})
    return model


def weights_of(model: nn.Module) -> list[Any]:
    """Return the weights of a model as arrays on the CPU."""
    return [value.detach().cpu().numpy() for value in model.state_dict().values()]


def fit(model: nn.Module, batches: Iterable[tuple[Any, Any]], rate: float = 0.05) -> Any:
    """Take one step of SGD with momentum per batch; return the last loss."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    loss = torch.zeros(())
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss


def epochs(images: Any, labels: Any, count: int, batch_size: int) -> Iterable[tuple[Any, Any]]:
    """Yield the batches of several epochs, in random order."""
    for _ in range(count):
        for batch in torch.randperm(len(labels)).split(batch_size):
            yield images[batch], labels[batch]
