"""What GPU clients do: train on images of CIFAR's size, hold memory, take steps of a small network."""

from __future__ import annotations

import ctypes
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import MODELS

Weights = list[Any]

_DEVICE = "cuda:0"  # the GPU that this process sees first
_PIECES = 16
_WIDTH, _SIDE = 1024, 16  # of the small network, and of its images


# Training -------------------------------------------------------------------------------------------------


class Trainer:
    """A model on the GPU, with a client's images, as long as this object is there.

    ``config`` has model, folder (of images and labels), partition, partitions, batch, steps and seed.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        import numpy as np
        import torch

        self._model = _model(config["model"]).to(_DEVICE)
        folder = Path(config["folder"])
        part = slice(config["partition"], None, config["partitions"])
        images = np.load(folder / "images.npy", mmap_mode="r")[part]
        labels = np.load(folder / "labels.npy", mmap_mode="r")[part]
        self._images = torch.from_numpy(np.ascontiguousarray(images)).to(_DEVICE)
        self._labels = torch.from_numpy(labels.astype(np.int64)).to(_DEVICE)

    def fit(self, weights: Weights, config: dict[str, Any]) -> tuple[Weights, int, dict[str, Any]]:
        """Train so many steps from ``weights``."""
        import torch

        names = self._model.state_dict().keys()
        self._model.load_state_dict(
            {name: torch.as_tensor(value) for name, value in zip(names, weights, strict=True)}
        )
        self._model.train()
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.02, momentum=0.9)
        generator = torch.Generator().manual_seed(config["seed"])
        count, batch, loss = len(self._labels), config["batch"], torch.zeros(())
        order = torch.randint(count, (config["steps"], batch), generator=generator).to(self._labels.device)
        for chosen in order:
            images = self._images[chosen].permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
            loss = torch.nn.functional.cross_entropy(self._model(images), self._labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained = [value.cpu().numpy() for value in self._model.state_dict().values()]
        return trained, config["steps"] * batch, {"loss": loss.item()}


def fit(weights: Weights, config: dict[str, Any]) -> tuple[Weights, int, dict[str, Any]]:
    return Trainer(config).fit(weights, config)


def initial_weights(seed: int, model: str) -> Weights:
    import torch

    torch.manual_seed(seed)
    return [value.numpy() for value in _model(model).state_dict().values()]


def _model(name: str) -> Any:
    _, small = MODELS[name]
    return small()


# Memory ---------------------------------------------------------------------------------------------------


def hold(nbytes: int, seconds: float) -> dict[str, Any]:
    """Take memory in pieces within the first fifth of the time, then keep it for the rest."""
    import torch

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
    """Ask CUDA itself for memory, as an extension does; its answer is 0 where it gets that."""
    import torch

    torch.zeros(1, device=_DEVICE)
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    return {"answer": runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(nbytes))}


def steps(name: str, seconds: float, count: int | None, marker: str) -> dict[str, Any]:
    """Train a small network from a fixed seed, for a time or for a number of steps.

    Deterministic (with ``CUBLAS_WORKSPACE_CONFIG``), so that the same number of steps gives the same loss to
    the last bit. The file ``marker`` is made when it begins.
    """
    import torch
    from torch import nn

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    if name == "elementwise":
        model = _model(name).to(_DEVICE)
    else:
        layers = nn.Linear(3 * _SIDE**2, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10)
        model = nn.Sequential(nn.Flatten(), *layers).to(_DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 3, _SIDE, _SIDE).to(_DEVICE)
    labels = torch.randint(10, (256,)).to(_DEVICE)
    done, last_loss, began = 0, math.nan, time.monotonic()
    Path(marker).touch()
    while done < count if count is not None else time.monotonic() < began + seconds:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        last_loss = loss.item()  # also waits for the GPU: the time is that of the steps
    return {"steps": done, "loss": last_loss, "first": began, "last": time.monotonic()}
