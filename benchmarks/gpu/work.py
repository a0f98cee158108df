"""What GPU clients do: train ResNet-18 on CIFAR-sized images, hold memory, take steps of a small network.

On a stub GPU everything is the same, but the arithmetic runs on the CPU, and memory is not taken but written
down; see :class:`Stub`.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from pathlib import Path
from typing import Any

Weights = list[Any]

#: What a simulated process takes of a stub GPU for its CUDA context.
STUB_CONTEXT_BYTES = 512 << 20

_PIECES = 16
_WIDTH = 1024  # of the small network


class Cuda:
    """Memory of the GPU that this process sees first."""

    device = "cuda:0"

    def __init__(self) -> None:
        self._held: list[Any] = []

    def take(self, nbytes: int) -> None:
        import torch

        self._held.append(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))

    def training(self, stub_bytes: int) -> None:
        """Take what training takes: it does that itself."""

    def finish(self) -> None:
        import torch

        torch.cuda.synchronize()


class Stub:
    """Memory of a stub GPU. Arithmetic runs on the CPU."""

    device = "cpu"

    def __init__(self) -> None:
        from flower_gpu.leases.lease import Lease

        self._uuid = os.environ["CUDA_VISIBLE_DEVICES"]
        self._taken = 0
        lease = Lease.from_environment(os.environ)
        self._cap_bytes = lease.shares[0].cap_bytes if lease else math.inf
        self._allocate(STUB_CONTEXT_BYTES)
        self._context = STUB_CONTEXT_BYTES

    def take(self, nbytes: int) -> None:
        if self._taken - self._context + nbytes > self._cap_bytes:
            raise _out_of_memory(nbytes)
        self._allocate(nbytes)

    def training(self, stub_bytes: int) -> None:
        self.take(stub_bytes)

    def finish(self) -> None:
        """Wait for the GPU: there is none."""

    def _allocate(self, nbytes: int) -> None:
        import nvml_stub

        folder = Path(os.environ["NVML_STUB_DIR"])
        with (folder / "lock").open("w") as lock:  # the driver hands out one piece at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            if nvml_stub.used(self._uuid) + nbytes > _total_bytes(folder):
                raise _out_of_memory(nbytes)
            self._taken += nbytes
            nvml_stub.allocate(self._uuid, self._taken)


def _total_bytes(folder: Path) -> int:
    fields = dict(line.split(" ", 1) for line in (folder / "gpu-0").read_text().splitlines())
    return int(fields["total"])


def _out_of_memory(nbytes: int) -> RuntimeError:
    return RuntimeError(f"CUDA out of memory. Tried to allocate {nbytes / (1 << 20):.2f} MiB. (a stub GPU)")


def memory_of(device: str) -> Cuda | Stub:
    return Stub() if device == "stub" else Cuda()


# ResNet-18 ------------------------------------------------------------------------------------------------


class Trainer:
    """A model on the GPU, with a client's images, as long as this object is there.

    ``config`` has device, folder (of images and labels), partition, partitions, batch, steps, seed, and what
    a training takes of a stub GPU.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        import numpy as np
        import torch

        self._memory = memory_of(config["device"])
        self._memory.training(config["stub_bytes"])
        device = self._memory.device
        self._model = _model_for(config["device"]).to(device)
        folder = Path(config["folder"])
        part = slice(config["partition"], None, config["partitions"])
        images = np.load(folder / "images.npy", mmap_mode="r")[part]
        labels = np.load(folder / "labels.npy", mmap_mode="r")[part]
        self._images = torch.from_numpy(np.ascontiguousarray(images)).to(device)
        self._labels = torch.from_numpy(labels.astype(np.int64)).to(device)

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


def initial_weights(seed: int, device: str) -> Weights:
    import torch

    torch.manual_seed(seed)
    return [value.numpy() for value in _model_for(device).state_dict().values()]


def _model_for(device: str) -> Any:
    """Return ResNet-18 as it is used for images of 32 x 32: without the early reductions."""
    from torch import nn

    if device == "stub":  # small, and without the import of torchvision
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


# Memory ---------------------------------------------------------------------------------------------------


def hold(device: str, nbytes: int, seconds: float) -> dict[str, Any]:
    """Take memory in pieces within the first fifth of the time, then keep it for the rest."""
    began = time.monotonic()
    memory = memory_of(device)
    for piece in range(_PIECES):
        memory.take(nbytes // _PIECES)
        memory.finish()
        time.sleep(max(0.0, began + seconds / 5 * (piece + 1) / _PIECES - time.monotonic()))
    taken = time.monotonic()
    time.sleep(max(0.0, began + seconds - taken))
    return {"taken": taken, "released": time.monotonic(), "nbytes": nbytes // _PIECES * _PIECES}


def steps(device: str, seconds: float, count: int | None, marker: str) -> dict[str, Any]:
    """Train a small network from a fixed seed, for a time or for a number of steps.

    Deterministic (with ``CUBLAS_WORKSPACE_CONFIG``), so that the same number of steps gives the same loss to
    the last bit. The file ``marker`` is made when it begins.
    """
    import torch
    from torch import nn

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    memory = memory_of(device)
    at = memory.device
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10)).to(at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(256, _WIDTH).to(at)
    labels = torch.randint(10, (256,)).to(at)
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
