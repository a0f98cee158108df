"""The setting of a part: its GPU, sizes, images, folder and deadline."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.clients import Client, ask, checked
from benchmarks.shared.processes import BenchmarkError

MB = 1_000_000
_CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """Amount of work of each part.

    Parameters
    ----------
    clients : int
        Clients of ``memory``.
    batch, steps : int
        Images per step of ResNet-18, and steps per call.
    images, side : int
        Number of generated images, and pixels of a side.
    fit, times : int
        For ``oversubscribe``: number of clients that fit on the GPU, and the ratio of clients to that.
    hold_s : float
        For ``oversubscribe``: seconds that each client holds its memory.
    neighbor_s : float
        For ``cap`` and ``mps``: seconds of training.
    round_clients, runs : int
        For ``throughput``: clients per round, and rounds per figure.
    concurrency : tuple of int
        For ``throughput``: numbers of clients that train at the same time.
    packed : tuple of int
        For ``mps``: numbers of clients.
    """

    clients: int = 20
    batch: int = 128
    steps: int = 25
    images: int = 50_000
    side: int = 32
    fit: int = 8
    times: int = 3
    hold_s: float = 6.0
    neighbor_s: float = 8.0
    round_clients: int = 16
    runs: int = 3
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    packed: tuple[int, ...] = (2, 8)


QUICK = Sizes(
    clients=2, batch=2, steps=1, images=16, side=8, fit=2, times=2, hold_s=0.5, neighbor_s=1.0,
    round_clients=2, runs=1, concurrency=(2,), packed=(2,),
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Memory of the GPU in bytes, without the driver's reserve."""

    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True)
class Setting:
    """The setting of a part.

    Parameters
    ----------
    model : str
        Name of the model: ``resnet18`` or ``elementwise``.
    uuid : str
        The only GPU that the clients see.
    folder : Path
        Folder for files of the part.
    sizes : Sizes
        Amount of work.
    limit_s : float
        Seconds until the deadline.
    data : Path, optional
        Images, see :func:`prepare_images`.
    """

    model: str
    uuid: str
    folder: Path
    sizes: Sizes
    limit_s: float
    data: Path | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """Deadline on the clock of ``time.monotonic``."""
        return self.began + self.limit_s

    def memory(self) -> Memory:
        """Return the memory of the GPU, by NVML."""
        from flower_gpu.gpu import inventory

        gpu = inventory.take(processes=False).find(self.uuid)
        if gpu is None or gpu.total_bytes is None or gpu.used_bytes is None:
            raise BenchmarkError(f"GPU {self.uuid} no longer reports its memory")
        return Memory(gpu.total_bytes - (gpu.reserved_bytes or 0), gpu.used_bytes)

    def used_mb(self) -> float:
        return self.memory().used_bytes / MB

    def trace(self) -> list[dict[str, Any]]:
        """Return all events of the part."""
        from flower_gpu.trace import read

        return list(read(self.folder / "trace.jsonl"))

    def weights(self, way: str = "") -> Path:
        """Return the file of the current weights of a way; by default, of the initial weights."""
        path = self.folder / f"{way}-weights.pkl"
        return path if path.exists() else self.folder / "-weights.pkl"

    def result(self, client: Client) -> Path:
        """Return the file for the weights that a client has trained."""
        return self.folder / f"{client.name.replace(' ', '-')}.pkl"

    def make_initial_weights(self, client: Client) -> None:
        """Have a client write the initial weights."""
        args, result = [0, self.model], str(self.folder / "-weights.pkl")
        request = {"do": "initial_weights", "args": args, "options": {"gpu": "never"}, "result": result}
        checked(ask(client, request, self.deadline), client)

    def fit_request(self, client: Client, partitions: int, seed: int, **options: Any) -> dict[str, Any]:
        """Return a request to train from the current weights. ``options`` go to GPUClient."""
        config = {
            "model": self.model, "folder": str(self.folder), "partition": client.number,
            "partitions": partitions, "batch": self.sizes.batch, "steps": self.sizes.steps, "seed": seed,
        }  # fmt: skip
        return {
            "do": "fit",
            "config": config,
            "weights": str(self.weights(client.way)),
            "result": str(self.result(client)),
            "options": {**options, "name": str(client.number)} if client.way == "ours" else {},
        }


@contextmanager
def gpu() -> Iterator[str]:
    """Choose a GPU, hide all others from this process and its children, and yield its UUID."""
    with _environment():
        from flower_gpu.gpu import inventory

        listed = inventory.take(processes=False)
        visible = listed.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        usable = [gpu for gpu in visible if gpu.is_usable]
        if not usable:
            reason = listed.problem or "; ".join(gpu.problem or "hidden" for gpu in listed.gpus)
            raise BenchmarkError(f"no NVIDIA GPU can be used here: {reason}")
        os.environ["CUDA_VISIBLE_DEVICES"] = usable[0].uuid
        try:
            yield usable[0].uuid
        finally:
            inventory.close()


@contextmanager
def part_folder() -> Iterator[Path]:
    """Make a folder for one part, with the trace of its workers."""
    with tempfile.TemporaryDirectory(prefix="fgpu-part-") as folder, _environment():
        # Many processes share the cores, and the work is on the GPU.
        os.environ |= {"OMP_NUM_THREADS": "1", "FLOWER_GPU_RUN_DIR": folder}
        yield Path(folder)


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def prepare_images(setting: Setting) -> str:
    """Write ``images.npy`` (uint8, n x side x side x 3) and ``labels.npy``; return a description."""
    if setting.data is None:
        images, labels = _generated(setting.sizes.images, setting.sizes.side)
        source = "generated"
    else:
        images, labels = _read(setting.data)
        source = setting.data.name
    np.save(setting.folder / "images.npy", images)
    np.save(setting.folder / "labels.npy", labels)
    return f"{source}, {len(labels)} images"


def _generated(count: int, side: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return images, random.integers(0, _CLASSES, count, dtype=np.uint8)


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read an npz file with ``labels`` and ``images``. JPEG images are in ``jpeg`` and ``offsets``."""
    with np.load(path) as file:
        missing = {"labels"} - set(file)
        if not missing and "images" in file:
            return file["images"], file["labels"]
        missing |= {"jpeg", "offsets"} - set(file)
        if missing:
            raise BenchmarkError(f"{path.name} has no {', '.join(sorted(missing))}; it has {', '.join(file)}")
        jpeg, offsets, labels = file["jpeg"].tobytes(), file["offsets"], file["labels"]
    from PIL import Image

    pictures = [Image.open(io.BytesIO(jpeg[begin:end])).convert("RGB") for begin, end in pairwise(offsets)]
    return np.stack([np.asarray(picture) for picture in pictures]), labels
