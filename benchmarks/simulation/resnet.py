"""Part ``resnet``: ResNet-18 on images of CIFAR's size, with several numbers of calls per worker."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.setting import QUICK, Setting, Sizes, prepare_images
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.digits import compare_to_ideal, show, timed_row, ways_of
from benchmarks.simulation.engines import Done, in_turn

CALLS, QUICK_CALLS = (1, 4, 16), (1, 2)
CLIENTS, QUICK_CLIENTS = 64, 2

_ROUNDS, _STEPS, _BATCH = 2, 10, 32
_AT_A_TIME = 4


def measure(
    device: str, data: Path | None, engines: Sequence[str], runs: int, *, quick: bool
) -> list[dict[str, Any]]:
    """Return a row per engine and calls per worker."""
    sizes = QUICK if quick else Sizes()
    clients, calls = (QUICK_CLIENTS, QUICK_CALLS) if quick else (CLIENTS, CALLS)
    with tempfile.TemporaryDirectory(prefix="fgpu-sim-") as folder:
        setting = Setting(device, "", Path(folder), sizes, 0.0, data)
        images = prepare_images(setting)
        config = {
            "num-server-rounds": 1 if quick else _ROUNDS,
            "steps": 1 if quick else _STEPS,
            "batch": 2 if quick else _BATCH,
            "device": device,
            "data": folder,
            "seed": 0,
        }
        num_gpus = 1 / _AT_A_TIME if device == "cuda" else 0.0
        ways = ways_of("resnet", clients, config, engines, calls, num_gpus)
        done = in_turn(ways, runs)
    rows = [
        {**timed_row(ways[name], each), "device": device, "images": images} for name, each in done.items()
    ]
    compare_to_ideal(rows, at_a_time=1 if device == "cuda" else None)  # one GPU: the loop has all of it
    title = f"ResNet-18 on {device}, {clients} clients, {config['num-server-rounds']} rounds ({images})"
    show(title, rows, "the loop, which has all of the GPU" if device == "cuda" else "the loop by the cores")
    _check(done)
    return rows


def _check(done: dict[str, list[Done]]) -> None:
    for name, runs in done.items():
        if not all(np.isfinite(array).all() for array in runs[-1].model):
            raise BenchmarkError(f"resnet: {name} gave a model with values that are not finite")
