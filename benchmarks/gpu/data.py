"""Images for the clients: real ones from a file, or generated."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.setting import Setting
from benchmarks.shared.processes import BenchmarkError

_CLASSES = 10


def prepare(setting: Setting) -> str:
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
