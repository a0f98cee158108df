"""What a process per call costs with CUDA in it: ResNet-18 training, cut into its parts.

Start (from the call to the task's first line), context (first CUDA call), model (built and copied), first
step, later step, and exit (from the result to the moment its process is gone and the memory is back).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from statistics import median
from typing import Any

import machine
import table
from gpu_caller import WAYS
from options import EXIT_USAGE, Parser, chosen, json_file, positive
from processes import BenchmarkError, Member, members, nothing_left_behind

PARTS = ("start", "context", "model", "first_step", "later_step", "exit", "total")
_TIMEOUT_S = 300.0


def main() -> int:
    options = _options()
    described = machine.describe()
    if options.device == "cuda":
        if not described["gpus"]:
            print(
                "gpu.py: there is no NVIDIA GPU here, or no driver for it: nothing measured", file=sys.stderr
            )
            return EXIT_USAGE
        described["driver"] = machine.driver_version()
    try:
        with nothing_left_behind():
            rows = measure(options)
    except BenchmarkError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _show(rows, options.device)
    if options.json:
        result = {"machine": described, "device": options.device, "steps": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per way, with the median of each part in seconds."""
    parts: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    arguments = options.device, options.batch, options.side
    with members(partial(Member, way, "gpu_caller.py", way, *arguments) for way in options.ways) as callers:
        for number in range(options.runs + 1):
            for caller in callers:
                reply = caller.ask(_TIMEOUT_S)
                if not (math.isfinite(reply["loss"]) and reply["changed"]):
                    raise BenchmarkError(f"{caller.name}: it did not train: loss {reply['loss']}")
                if number > 0:  # the first one starts what a way keeps
                    parts[caller.name].append(_parts(reply))
    return [_row(way, parts[way]) for way in options.ways]


def _parts(marks: dict[str, float]) -> dict[str, float]:
    return {
        "start": marks["entered"] - marks["began"],
        "context": marks["context"] - marks["entered"],
        "model": marks["model"] - marks["context"],
        "first_step": marks["first_step"] - marks["model"],
        "later_step": (marks["later_steps"] - marks["first_step"]) / marks["later_count"],
        "exit": marks["ended"] - marks["result"],
        "total": marks["ended"] - marks["began"],
    }


def _row(way: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    medians = {f"{part}_s": round(median(run[part] for run in runs), 5) for part in PARTS}
    return {"way": way, "runs": len(runs), **medians}


def _show(rows: list[dict[str, Any]], device: str) -> None:
    table.show(
        f"ResNet-18 on {device}, medians",
        ("way", "runs", *(part.replace("_", " ") for part in PARTS)),
        [(row["way"], row["runs"], *(table.seconds(row[f"{part}_s"]) for part in PARTS)) for row in rows],
    )


def _options() -> argparse.Namespace:
    known = list(WAYS)
    parser = Parser(prog="gpu.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ways", type=partial(chosen, known), default=known, metavar="WAY,WAY",
                        help=f"some of {', '.join(known)}; default: all")  # fmt: skip
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs of each way; default: 5")
    parser.add_argument(
        "--batch", type=positive, default=32, metavar="N", help="images per step; default: 32"
    )
    parser.add_argument(
        "--side", type=positive, default=224, metavar="PIXELS", help="of an image; default: 224"
    )
    parser.add_argument("--json", type=json_file, metavar="FILE", help="also write the figures there")
    # The CPU shows that the script works, and nothing about GPUs.
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
