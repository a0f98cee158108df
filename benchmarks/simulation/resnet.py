"""Part ``resnet``: ResNet-18 on images of CIFAR's size, on a GPU: ours, Ray with several shares, a loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.setting import QUICK, Setting, Sizes, prepare_images
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.digits import compare_to_ideal, show, timed_row
from benchmarks.simulation.engines import Done, Run, in_turn

CLIENTS, QUICK_CLIENTS = (16, 64), (2,)

_ROUNDS, _STEPS, _BATCH = 5, 10, 32
#: How many of Ray's actors share the GPU. Who uses Ray has to know how many fit.
_SHARED, _QUICK_SHARED = (16, 8, 4, 2, 1), (2, 1)

Rows = list[dict[str, Any]]


def measure(
    device: str,
    model: str,
    data: Path | None,
    engines: Sequence[str],
    runs: int,
    tell: Callable[[Rows], object],
    *,
    quick: bool,
) -> None:
    """Measure each way with each number of clients; ``tell`` gets all rows so far after each run."""
    sizes = QUICK if quick else Sizes()
    finished: Rows = []
    with tempfile.TemporaryDirectory(prefix="fgpu-sim-") as folder:
        images = prepare_images(Setting(model, "", Path(folder), sizes, 0.0, data))
        config = {
            "num-server-rounds": 2 if quick else _ROUNDS,
            "steps": 1 if quick else _STEPS,
            "batch": 2 if quick else _BATCH,
            "device": device,
            "name": model,
            "data": folder,
            "seed": 0,
        }
        for clients in QUICK_CLIENTS if quick else CLIENTS:
            ways = _ways(clients, config, engines, _QUICK_SHARED if quick else _SHARED)
            finished += _with(ways, images, runs, partial(_tell_more, tell, finished))
            title = f"{model} on {device}, {clients} clients, {config['num-server-rounds']} rounds ({images})"
            show(title, finished[-len(ways) :], "the loop" if device == "cuda" else "the loop by the cores")


def _tell_more(tell: Callable[[Rows], object], finished: Rows, rows: Rows) -> None:
    tell([*finished, *rows])


def _with(ways: Mapping[str, Run], images: str, runs: int, tell: Callable[[Rows], object]) -> Rows:
    """Run these ways; ``tell`` gets their rows so far after each run."""

    def rows(done: Mapping[str, list[Done]]) -> Rows:
        found = [_row(way, run, done[way], images) for way, run in ways.items() if done[way]]
        # On a GPU the loop has all of it.
        compare_to_ideal(found, at_a_time=1 if found[0]["device"] == "cuda" else None)
        return found

    done = in_turn(ways, runs, lambda done: tell(rows(done)))
    tell(found := rows(done))
    _check(done)
    return found


def _ways(
    clients: int, config: Mapping[str, Any], engines: Sequence[str], shared: Sequence[int]
) -> dict[str, Run]:
    def way(engine: str, *options: str, num_gpus: float = 0.0) -> Run:
        return Run(engine, "resnet", clients, config, True, options, num_gpus)

    is_on_gpu = config["device"] == "cuda"
    gpu = ("--gpu", "require") if is_on_gpu else ()
    ways: dict[str, Run] = {}
    if "loop" in engines:
        ways["loop"] = way("loop")
    if "ours" in engines:  # of how much each client takes nothing is said
        ways["ours"] = way("ours", *gpu)
        ways["ours, one call per worker"] = way("ours", "--calls-per-worker", "1", *gpu)
    if "ray" in engines:
        parts = {f"ray, 1/{count} of the GPU": 1 / count for count in shared} if is_on_gpu else {"ray": 0.0}
        ways |= {name: way("ray", num_gpus=part) for name, part in parts.items()}
    return ways


def _row(way: str, run: Run, done: Sequence[Done], images: str) -> dict[str, Any]:
    told = {"num_gpus": run.num_gpus or None, "device": run.config["device"], "images": images}
    return {"way": way, **timed_row(run, done), **told}


def _check(done: dict[str, list[Done]]) -> None:
    for way, runs in done.items():
        if not all(np.isfinite(array).all() for array in runs[-1].model):
            raise BenchmarkError(f"resnet: {way} gave a model with values that are not finite")
