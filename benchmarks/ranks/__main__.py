"""What ranks cost and bring: a function as it is, as a distributed one on one GPU or CPU, and in ranks.

Two parts: calls that do nothing (``start``), and training (``train``), each way in turn. README.md says how
to read them.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options, Parser, positive, run
from benchmarks.shared.processes import BenchmarkError

_UNTIMED = 2  # the first calls start the fork server and teach it
_START = {"plain": ("nothing", 1), "one": ("nothing_in_ranks", 1), "ranks": ("nothing_in_ranks", 0)}
_TRAIN = {
    "plain": ("train", 1),
    "one": ("train_in_ranks", 1),
    "ddp": ("train_in_ranks", 0),
    "fsdp": ("train_in_ranks", 0),
}
_PARTS = {"start": _START, "train": _TRAIN}


def main() -> int:
    parser = Parser("ranks", __doc__, list(_PARTS), quick={})
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--ranks", type=positive, metavar="N", help="default: 2; on a GPU host all of its GPUs")
    add(
        "--model",
        metavar="NAME",
        help="mlp1024, mlp4096, ..., or resnet18; default: mlp1024, on GPUs resnet18",
    )
    add("--batch", type=positive, metavar="N", help="of all ranks together; default: 256, on GPUs 512")
    add("--steps", type=positive, metavar="N", help="of each call; default: 40")
    add("--runs", type=positive, metavar="N", help="timed calls of each way; default: 7")
    options = parser.parse()
    on_gpu = options.device == "cuda"
    usual = {
        "ranks": _gpus() if on_gpu else 2,
        "model": "resnet18" if on_gpu else "mlp1024",
        "batch": 512 if on_gpu else 256,
        "steps": 40,
        "runs": 7,
    }
    tiny = {"model": "mlp16", "batch": 8, "steps": 4, "runs": 1} if options.quick else {}
    for name, value in {**usual, **tiny}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    parts = {part: partial(_measure, part) for part in _PARTS}
    return run(parser, options, parts, {"quick": options.quick})


def _measure(part: str, options: Options, figures: Figures) -> None:
    from flower_gpu import GPUClient, run_in_worker

    gpu = "require" if options.device == "cuda" else "never"
    config = {"model": options.model, "batch": options.batch, "steps": options.steps}
    weights = run_in_worker("benchmarks.ranks.task:weights_of", options.model, gpu="never")
    ways = {name: (function, count or options.ranks) for name, (function, count) in _PARTS[part].items()}
    if options.ranks == 1:  # one GPU has nothing to share
        ways = {name: way for name, way in ways.items() if name in ("plain", "one")}
    clients = {
        name: GPUClient(f"benchmarks.ranks.task:{function}", num_gpus=count, gpu=gpu)
        for name, (function, count) in ways.items()
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    learned: dict[str, Any] = {}
    for number in range(0 if options.quick else -_UNTIMED, options.runs):
        for name, client in clients.items() if number % 2 == 0 else reversed(clients.items()):
            began = time.perf_counter()
            learned[name], _, metrics = client.fit(weights, {**config, "way": name})
            if number >= 0:
                taken[name].append((time.perf_counter() - began, metrics["step_s"]))
    if options.model == "resnet18":  # BatchNorm: each rank has statistics of its own part
        learned = {name: each for name, each in learned.items() if name in ("plain", "one")}
    _check(learned, weights if part == "start" else None, options.device)
    figures[part] = [
        {
            "way": name,
            "ranks": ways[name][1],
            "runs": len(each),
            "call_s": round(median(call_s for call_s, _ in each), 4),
            "step_s": round(median(step_s for _, step_s in each), 6),
        }
        for name, each in taken.items()
    ]
    _show(part, figures[part], options)


def _check(learned: dict[str, Any], expected: Any, device: str) -> None:
    """Refuse figures of ways that have not done the same."""
    expected = learned["plain"] if expected is None else expected
    tolerance = 1e-3 if device == "cuda" else 1e-5  # GPUs sum in another order, and in TF32
    for name, weights in learned.items():
        off = max(float(np.abs(a - b).max()) for a, b in zip(expected, weights, strict=True))
        if not off <= tolerance:
            raise BenchmarkError(f"{name} has other weights than the plain function, by up to {off:g}")


def _show(part: str, rows: list[dict[str, Any]], options: Options) -> None:
    plain = rows[0]
    what = "calls that do nothing" if part == "start" else f"{options.model}, batch {options.batch}"
    table.show(
        f"{part}: {what}, {options.device}",
        ("way", "ranks", "call", "to plain", "step", "to plain", "runs"),
        [
            (
                row["way"],
                row["ranks"],
                table.seconds(row["call_s"]),
                f"{row['call_s'] / plain['call_s']:.2f}",
                table.seconds(row["step_s"]),
                f"{row['step_s'] / plain['step_s']:.2f}" if plain["step_s"] else "",
                row["runs"],
            )
            for row in rows
        ],
    )


def _gpus() -> int:
    from flower_gpu.gpu import inventory

    return max(1, len(inventory.take(processes=False).usable))


if __name__ == "__main__":
    sys.exit(main())
