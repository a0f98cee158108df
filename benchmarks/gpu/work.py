"""Work of GPU clients: train on images, hold memory, take steps of a small network."""

from __future__ import annotations

import ctypes
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.app.bench_app import networks
from benchmarks.app.bench_app.images import MODELS, MeanColor, Trainer

Weights = list[Any]

_LATER_STEPS = 3

_DEVICE = "cuda:0"  # The first GPU that this process sees.
_PIECES = 16
_WIDTH, _SIDE = 1024, 16  # The small network, and the side of its images.


def fit(weights: Weights, config: dict[str, Any]) -> tuple[Weights, int, dict[str, Any]]:
    """Train with a new model, like ``fit`` of a NumPyClient."""
    return fit_with(new_trainer(config), weights, config)


def new_trainer(config: dict[str, Any]) -> Trainer:
    place = config["partition"], config["partitions"]
    return Trainer(config["model"], config["folder"], *place, _DEVICE)


def fit_with(
    trainer: Trainer, weights: Weights, config: dict[str, Any]
) -> tuple[Weights, int, dict[str, Any]]:
    trained, loss = trainer.fit(weights, config["steps"], config["batch"], config["seed"])
    return trained, config["steps"] * config["batch"], {"loss": loss}


def initial_weights(seed: int, model: str) -> Weights:
    torch.manual_seed(seed)
    return networks.weights_of(MODELS[model]())


def train_in_steps(weights: Weights | None, name: str, batch: int, side: int) -> dict[str, Any]:
    """Train from ``weights``, or from random ones; return the new weights and the end of each step.

    The times are of the monotonic clock, which is the same for all processes on Linux.
    """
    marks = {"entered": time.monotonic()}
    # The first call of CUDA creates the context.
    torch.zeros(1, device=_DEVICE)
    torch.cuda.synchronize()
    marks["context"] = time.monotonic()
    model = _large_model(name)
    if weights is not None:
        networks.load(model, weights)
    model.to(_DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(batch, 3, side, side, device=_DEVICE)
    labels = torch.randint(10, (batch,), device=_DEVICE)
    torch.cuda.synchronize()
    marks["model"] = time.monotonic()
    loss = _step(model, optimizer, images, labels)
    torch.cuda.synchronize()
    marks["first_step"] = time.monotonic()
    for _ in range(_LATER_STEPS):
        loss = _step(model, optimizer, images, labels)
    torch.cuda.synchronize()
    marks["later_steps"] = time.monotonic()
    result = {"weights": networks.weights_of(model), "loss": loss.item(), "pid": os.getpid()}
    marks["result"] = time.monotonic()
    return {**result, "marks": {**marks, "later_count": _LATER_STEPS}}


def _large_model(name: str) -> nn.Module:
    """Return the usual model for large images."""
    if name == "elementwise":
        return MeanColor()
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=10)
    return model


def _step(model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def hold(nbytes: int, seconds: float) -> dict[str, Any]:
    """Allocate memory in pieces during the first fifth of the time, and keep it until the end."""
    began = time.monotonic()
    held = []
    for piece in range(_PIECES):
        held.append(torch.zeros(nbytes // _PIECES, dtype=torch.uint8, device=_DEVICE))
        torch.cuda.synchronize()
        time.sleep(max(0.0, began + seconds / 5 * (piece + 1) / _PIECES - time.monotonic()))
    taken = time.monotonic()
    time.sleep(max(0.0, began + seconds - taken))
    return {"taken": taken, "released": time.monotonic(), "nbytes": sum(piece.nbytes for piece in held)}


def take_from_cuda(nbytes: int) -> dict[str, Any]:
    """Return the status of ``cudaMalloc``, which extensions call. 0 is success."""
    torch.zeros(1, device=_DEVICE)
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    return {"answer": runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(nbytes))}


def steps(name: str, seconds: float, count: int | None, marker: str) -> dict[str, Any]:
    """Train a small network from a fixed seed, for a time or for a number of steps.

    With ``CUBLAS_WORKSPACE_CONFIG`` it is deterministic: the same number of steps gives the same loss to
    the last bit. The file ``marker`` is created when the training begins.
    """
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    if name == "elementwise":
        model: nn.Module = MeanColor().to(_DEVICE)
    else:
        layers = nn.Linear(3 * _SIDE**2, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10)
        model = nn.Sequential(nn.Flatten(), *layers).to(_DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 3, _SIDE, _SIDE).to(_DEVICE)
    labels = torch.randint(10, (256,)).to(_DEVICE)
    done, last_loss, began = 0, math.nan, time.monotonic()
    Path(marker).touch()
    while done < count if count is not None else time.monotonic() < began + seconds:
        # item() waits for the GPU, so the time is that of the steps.
        last_loss = _step(model, optimizer, inputs, labels).item()
        done += 1
    return {"steps": done, "loss": last_loss, "first": began, "last": time.monotonic()}
