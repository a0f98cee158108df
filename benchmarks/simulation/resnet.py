"""Part ``resnet``: ResNet-18 on a GPU: ours, Ray with several shares of the GPU, and a loop."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.setting import QUICK, Setting, Sizes, prepare_images
from benchmarks.shared import driver, machine, table
from benchmarks.shared.driver import Figures, Options, Rows
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Result, Run, perform
from benchmarks.simulation.rows import COLUMNS, compare_to_ideal, timed_row

_CLIENTS, _QUICK_CLIENTS = (16, 64), (2,)
_ROUNDS, _STEPS, _BATCH = 5, 10, 32
#: Limit for one run, so that a run that hangs leaves time for the others.
_TIMEOUT_S = 240.0
#: Numbers of Ray's actors that share the GPU. Its users have to know how many fit.
_ACTORS, _QUICK_ACTORS = (16, 8, 4, 2, 1), (2, 1)


def measure(options: Options, figures: Figures) -> None:
    """Add a row per way and number of clients. The figures are written after each run."""
    figures["resnet"] = []
    if options.device == "cuda" and not machine.gpu_models():
        print("\nresnet is left out: there is no NVIDIA GPU here", file=sys.stderr)
        return
    sizes = QUICK if options.quick else Sizes()
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fgpu-sim-") as folder:
        images = prepare_images(Setting(options.model, "", Path(folder), sizes, 0.0, options.data))
        config = {
            "num-server-rounds": 2 if options.quick else _ROUNDS,
            "steps": 1 if options.quick else _STEPS,
            "batch": 2 if options.quick else _BATCH,
            "device": options.device,
            "network": options.model,
            "data": folder,
        }
        for clients in _QUICK_CLIENTS if options.quick else _CLIENTS:
            finished = list(figures["resnet"])

            def report(rows: Rows, finished: Rows = finished) -> None:
                figures["resnet"] = [*finished, *rows]
                driver.write(options, figures)

            _measure(_runs(clients, config, options), images, options.runs, failed, report)
            title = f"{options.model} on {options.device}, {clients} clients ({images})"
            table.show(title, figures["resnet"][len(finished) :], f"way {COLUMNS}")
    if failed:
        raise BenchmarkError(f"resnet: {', '.join(failed)} failed; see the messages above")


def _measure(
    runs: Mapping[str, Run], images: str, count: int, failed: list[str], report: Callable[[Rows], None]
) -> None:
    """Perform runs in alternation, and report all rows after each. Failed runs are added to ``failed``."""
    results: dict[str, list[Result]] = {way: [] for way in runs}
    for _, way in driver.in_turn(runs, count):
        run = runs[way]
        try:
            result = perform(run, timeout_s=_TIMEOUT_S)
            if not all(np.isfinite(array).all() for array in result.model):
                raise BenchmarkError(f"{way}: the model has values that are not finite")
            results[way].append(result)
        except BenchmarkError as error:
            failed.append(f"{way} with {run.clients} clients")
            print(f"resnet: {failed[-1]}: {error}", flush=True)
        rows = [
            {
                "way": name,
                **timed_row(runs[name], found),
                "num_gpus": runs[name].num_gpus or None,
                "device": run.config["device"],
                "images": images,
            }
            for name, found in results.items()
            if found
        ]
        # On a GPU, the loop has all of it.
        compare_to_ideal(rows, concurrency=1 if run.config["device"] == "cuda" else None)
        report(rows)


def _runs(clients: int, config: Mapping[str, Any], options: Options) -> dict[str, Run]:
    def run(engine: str, *more: str, num_gpus: float = 0.0) -> Run:
        return Run(engine, "images", clients, config, True, more, num_gpus)

    is_on_gpu = options.device == "cuda"
    gpu = ("--gpu", "require") if is_on_gpu else ()
    runs: dict[str, Run] = {}
    if "loop" in options.engines:
        runs["loop"] = run("loop")
    if "ours" in options.engines:
        runs["ours"] = run("ours", *gpu)
        if not options.quick:
            runs["ours, one call per worker"] = run("ours", "--calls-per-worker", "1", *gpu)
    if "ray" in options.engines and is_on_gpu:
        for actors in _QUICK_ACTORS if options.quick else _ACTORS:
            runs[f"ray, 1/{actors} of the GPU"] = run("ray", num_gpus=1 / actors)
    elif "ray" in options.engines:
        runs["ray"] = run("ray")
    return runs
