"""One client's training on a GPU, cut into the parts that the benchmark reports."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.gpu.models import MODELS

Weights = list[NDArray[Any]]

LATER_STEPS = 3

_DEVICE = "cuda"


def train(weights: Weights | None, name: str, batch: int, side: int) -> dict[str, Any]:
    """Train a model from ``weights``, or from random ones; return the new weights and when each part ended.

    The times are of the monotonic clock, which is one for all processes of a Linux machine.
    """
    marks = {"entered": time.monotonic()}
    torch.zeros(1, device=_DEVICE)  # the first CUDA call: the context
    torch.cuda.synchronize()
    marks["context"] = time.monotonic()
    large, _ = MODELS[name]
    model = large()
    if weights is not None:
        names = model.state_dict().keys()
        model.load_state_dict({name: torch.tensor(value) for name, value in zip(names, weights, strict=True)})
    model.to(_DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(batch, 3, side, side, device=_DEVICE)
    labels = torch.randint(10, (batch,), device=_DEVICE)
    torch.cuda.synchronize()
    marks["model"] = time.monotonic()
    loss = _step(model, optimizer, images, labels)
    torch.cuda.synchronize()
    marks["first_step"] = time.monotonic()
    for _ in range(LATER_STEPS):
        loss = _step(model, optimizer, images, labels)
    torch.cuda.synchronize()
    marks["later_steps"] = time.monotonic()
    trained = [value.cpu().numpy() for value in model.state_dict().values()]
    value = loss.item()
    marks["result"] = time.monotonic()
    return {"weights": trained, "loss": value, "marks": marks, "later_count": LATER_STEPS, "pid": os.getpid()}


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def into_dict(*args: Any) -> None:
    *arguments, results = args
    result: MutableMapping[str, Any] = results
    result["train"] = train(*arguments)


def into_pipe(*args: Any) -> None:
    *arguments, end = args
    connection: Connection = end
    connection.send(train(*arguments))
    connection.close()
