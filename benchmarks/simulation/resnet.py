"""Part ``resnet``: ResNet-18 on images of CIFAR's size, on a GPU: ours, Ray with several shares, a loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.setting import QUICK, Setting, Sizes, prepare_images
from benchmarks.shared import driver
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.digits import compare_to_ideal, show, timed_row
from benchmarks.simulation.engines import Done, Run, perform

CLIENTS, QUICK_CLIENTS = (16, 64), (2,)

_ROUNDS, _STEPS, _BATCH = 5, 10, 32
_LIMIT_S = 240.0  # of a run: what hangs must not take the time of the others
#: How many of Ray's actors share the GPU. Who uses Ray has to know how many fit.
_SHARED, _QUICK_SHARED = (16, 8, 4, 2, 1), (2, 1)
_SINGLE = "ours, one call per worker"

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
    failed: list[str] = []
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
            if quick:
                ways.pop(_SINGLE, None)
            finished += _measured(ways, images, runs, failed, partial(_tell_more, tell, finished))
            title = f"{model} on {device}, {clients} clients, {config['num-server-rounds']} rounds ({images})"
            rows = [row for row in finished if row["clients"] == clients]
            show(title, rows, "the loop" if device == "cuda" else "the loop by the cores")
    if failed:
        raise BenchmarkError(f"resnet: {', '.join(failed)} failed; see what was printed")


def _tell_more(tell: Callable[[Rows], object], finished: Rows, rows: Rows) -> None:
    tell([*finished, *rows])


def _measured(
    ways: Mapping[str, Run], images: str, runs: int, failed: list[str], tell: Callable[[Rows], object]
) -> Rows:
    """Run these ways in turn, also after one has failed; ``tell`` gets their rows so far after each run.

    The ways that failed are added to ``failed``.
    """
    done: dict[str, list[Done]] = {way: [] for way in ways}
    rows: Rows = []
    for _, way in driver.in_turn(ways, runs):
        try:
            found = perform(ways[way], timeout_s=_LIMIT_S)
            if not all(np.isfinite(array).all() for array in found.model):
                raise BenchmarkError(f"{way} gave a model with values that are not finite")
            done[way].append(found)
        except BenchmarkError as error:
            failed.append(f"{way} with {ways[way].clients} clients")
            print(f"resnet: {failed[-1]}: {error}", flush=True)
        rows = [_row(way, run, done[way], images) for way, run in ways.items() if done[way]]
        # On a GPU the loop has all of it.
        compare_to_ideal(rows, at_a_time=1 if ways[way].config["device"] == "cuda" else None)
        tell(rows)
    return rows


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
        ways[_SINGLE] = way("ours", "--calls-per-worker", "1", *gpu)
    if "ray" in engines:
        parts = {f"ray, 1/{count} of the GPU": 1 / count for count in shared} if is_on_gpu else {"ray": 0.0}
        ways |= {name: way("ray", num_gpus=part) for name, part in parts.items()}
    return ways


def _row(way: str, run: Run, done: Sequence[Done], images: str) -> dict[str, Any]:
    told = {"num_gpus": run.num_gpus or None, "device": run.config["device"], "images": images}
    return {"way": way, **timed_row(run, done), **told}
