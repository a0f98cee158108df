"""Tasks that allocate GPU memory with a given framework and hold it for a while."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PIECE = 64 * 2**20
_PATIENCE_S = 120


def begin_tensorflow() -> Callable[[int], Any]:
    import tensorflow as tf

    # With soft placement, TensorFlow would fall back to main memory and fill it instead of failing.
    tf.config.set_soft_device_placement(False)

    def make(nbytes: int) -> Any:
        with tf.device("/GPU:0"):
            return tf.fill([nbytes // 4], 1.0)

    return make


def begin_jax() -> Callable[[int], Any]:
    import jax
    import jax.numpy as jnp

    (gpu,) = jax.devices("cuda")

    def make(nbytes: int) -> Any:
        return jax.device_put(jnp.zeros(nbytes, jnp.uint8), gpu).block_until_ready()

    return make


def begin_torch() -> Callable[[int], Any]:
    import torch

    return lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device="cuda")


BEGIN = {"tensorflow": begin_tensorflow, "jax": begin_jax, "torch": begin_torch}


def sees_gpu(library: str) -> bool:
    """Return True if this build of a library can use the GPU."""
    try:
        BEGIN[library]()(1024)
    except Exception:
        return False
    return True


def take(library: str, nbytes: int) -> int:
    """Allocate memory in one piece."""
    BEGIN[library]()(nbytes)
    return nbytes


def take_all_and_hold(library: str, folder: str) -> int:
    """Allocate pieces until memory runs out, and hold them until the test has measured all workers."""
    make = BEGIN[library]()
    held: list[Any] = []
    try:
        while True:
            held.append(make(PIECE))
    except Exception as error:
        from flower_gpu.frameworks import out_of_memory

        if not out_of_memory.out_of_memory_in(error):
            raise
    _report_and_wait(Path(folder), library)
    return len(held) * PIECE


def take_little_and_hold(library: str, folder: str) -> int:
    """Allocate very little memory, and hold it until the test has measured it."""
    held = BEGIN[library]()(1024)
    _report_and_wait(Path(folder), library)
    del held
    return 1024


def _report_and_wait(folder: Path, library: str) -> None:
    gc.collect()
    (folder / f"{library}.new").write_text(str(os.getpid()))
    (folder / f"{library}.new").rename(folder / library)
    deadline = time.monotonic() + _PATIENCE_S
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
