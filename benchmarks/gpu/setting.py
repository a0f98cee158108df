"""What all parts of the GPU benchmarks share: the GPU, sizes, images, a folder, and their time."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.processes import BenchmarkError

MB = 1_000_000
_CLASSES = 10  # of generated images


@dataclass(frozen=True)
class Sizes:
    """How much each part does.

    Parameters
    ----------
    clients : int
        Of ``memory``.
    batch, steps : int
        Images of a step of ResNet-18, and steps of a call.
    images, side : int
        Generated where no data is given: how many, and pixels of a side.
    fit, times : int
        Of ``oversubscribe``: how many clients fit on the GPU by their size, and how many times as many there
        are.
    hold_s : float
        How long each of them holds its memory, in seconds.
    neighbour_s : float
        How long the neighbour of ``cap`` trains, in seconds.
    round_clients, runs : int
        Of ``throughput``: clients of a round, and rounds measured for each figure.
    concurrency : tuple of int
        How many of them train at the same time.
    packed : tuple of int
        Of ``mps``: numbers of clients.
    """

    clients: int = 20
    batch: int = 128
    steps: int = 25
    images: int = 50_000
    side: int = 32
    fit: int = 8
    times: int = 3
    hold_s: float = 6.0
    neighbour_s: float = 8.0
    round_clients: int = 16
    runs: int = 3
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    packed: tuple[int, ...] = (2, 8)


QUICK = Sizes(
    clients=2, batch=2, steps=1, images=16, side=8, fit=2, times=2, hold_s=0.5, neighbour_s=1.0,
    round_clients=2, runs=1, concurrency=(2,), packed=(2,),
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Memory of the GPU at one moment, in bytes; what the driver keeps for itself is in neither."""

    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True)
class Setting:
    """What a part measures with.

    Parameters
    ----------
    model : str
        What is trained: one of :data:`benchmarks.gpu.models.MODELS`.
    uuid : str
        The GPU; the only one that the clients see.
    folder : Path
        For the part's files.
    sizes : Sizes
        How much it does.
    limit_s : float
        How long it may take.
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
        """When it must be over, on the clock of ``time.monotonic``."""
        return self.began + self.limit_s

    def memory(self) -> Memory:
        """Return what the GPU has, as the driver tells."""
        from flower_gpu.gpu import inventory

        gpu = inventory.take(processes=False).find(self.uuid)
        if gpu is None or gpu.total_bytes is None or gpu.used_bytes is None:
            raise BenchmarkError(f"GPU {self.uuid} does not tell its memory any more")
        return Memory(gpu.total_bytes - (gpu.reserved_bytes or 0), gpu.used_bytes)

    def used_mb(self) -> float:
        return self.memory().used_bytes / MB

    def trace(self) -> list[dict[str, Any]]:
        """Return the events of the part so far."""
        from flower_gpu.trace import read

        return list(read(self.folder / "trace.jsonl"))


@contextmanager
def gpu() -> Iterator[str]:
    """Choose the GPU, and let this process and its children see no other. Yields its UUID."""
    with _environment():
        from flower_gpu.gpu import inventory

        found = inventory.take(processes=False)
        usable = found.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        usable = tuple(one for one in usable if one.is_usable)
        if not usable:
            reason = found.problem or "; ".join(one.problem or "hidden" for one in found.gpus)
            raise BenchmarkError(f"no NVIDIA GPU can be used here: {reason}")
        os.environ["CUDA_VISIBLE_DEVICES"] = usable[0].uuid
        try:
            yield usable[0].uuid
        finally:
            inventory.close()


@contextmanager
def part_folder(variables: Mapping[str, str]) -> Iterator[Path]:
    """Make a folder for one part; its workers write their trace there."""
    with tempfile.TemporaryDirectory(prefix="fgpu-part-") as folder, _environment():
        os.environ.update({**variables, "FLOWER_GPU_RUN_DIR": folder})
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
    """Write ``images.npy`` (uint8, n x side x side x 3) and ``labels.npy``; return where they are from."""
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
    """Read an npz file with ``labels`` and either ``images`` or, as JPEG files, ``jpeg`` and ``offsets``."""
    with np.load(path) as file:
        missing = {"labels"} - set(file)
        if not missing and "images" in file:
            return file["images"], file["labels"]
        missing |= {"jpeg", "offsets"} - set(file)
        if missing:
            raise BenchmarkError(f"{path.name} has no {', '.join(sorted(missing))}; it has {', '.join(file)}")
        jpeg, offsets, labels = file["jpeg"].tobytes(), file["offsets"], file["labels"]
    from PIL import Image

    images = [
        np.asarray(Image.open(io.BytesIO(jpeg[begin:end])).convert("RGB")) for begin, end in pairwise(offsets)
    ]
    return np.stack(images), labels
