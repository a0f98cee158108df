"""A simulation by `flower-gpu simulate`, and the same app by Flower's Simulation Runtime with Ray, in turn.

Parts: no-op (what a message costs, and memory), many (10,000 clients), digits (small clients, beside a plain
loop), accuracy (the models of both), failures (clients that fail), resnet (on a GPU). README.md says what is
measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import machine
import simulation_digits
import simulation_failures
import simulation_no_op
import simulation_resnet
from options import EXIT_USAGE, Parser, chosen, json_file, positive
from processes import BenchmarkError, nothing_left_behind
from simulation_engines import ENGINES, available

_PARTS = ("no-op", "many", "digits", "accuracy", "failures", "resnet")


def main() -> int:
    options = _options()
    if sys.platform != "linux":
        print("simulation.py needs Linux: it reads /proc", file=sys.stderr)
        return EXIT_USAGE
    result: dict[str, Any] = {"machine": {**machine.describe(), "ray": _ray()}, "quick": options.quick}
    failed = False
    try:
        with nothing_left_behind():
            for part in options.only:
                try:
                    result |= _run(part, options)
                    simulation_digits.check_near(result["accuracy"] if part == "accuracy" else [])
                except BenchmarkError as error:  # the figures of the others are not lost
                    print(f"simulation.py: {error}", file=sys.stderr)
                    failed = True
                if options.json:
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


def _run(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part; return what is to be written down, by name."""
    quick, runs, engines = options.quick, options.runs, options.engines
    if part == "no-op":
        sizes = simulation_no_op.QUICK_SIZES if quick else simulation_no_op.SIZES
        rows, ratios = simulation_no_op.measure(sizes, engines, runs)
        return {part: rows, "no-op-ratios": ratios}
    if part == "many":
        count = simulation_no_op.QUICK_MANY if quick else simulation_no_op.MANY
        return {part: simulation_no_op.measure_many(count)}
    if part == "digits":
        size = simulation_digits.QUICK_DIGITS if quick else simulation_digits.DIGITS
        return {part: simulation_digits.measure(*size, engines, options.epochs, runs)}
    if part == "accuracy":
        counts = simulation_digits.QUICK_ACCURACY if quick else simulation_digits.ACCURACY
        seeds = simulation_digits.QUICK_SEEDS if quick else simulation_digits.SEEDS
        return {part: simulation_digits.measure_accuracy(*counts, seeds, engines)}
    if part == "failures":
        size = simulation_failures.QUICK_SIZE if quick else simulation_failures.SIZE
        return {part: simulation_failures.measure(*size)}
    if options.device == "cuda" and not machine.gpu_models():
        print("\nresnet is left out: there is no NVIDIA GPU here", file=sys.stderr)
        return {part: []}
    return {part: simulation_resnet.measure(options.device, options.data, engines, runs, quick=quick)}


def _ray() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        return "none"


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _options() -> argparse.Namespace:
    parser = Parser(prog="simulation.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--only", type=partial(chosen, _PARTS), default=list(_PARTS), metavar="PART",
        help=f"some of {', '.join(_PARTS)}; default: all")  # fmt: skip
    add("--runs", type=positive, metavar="N", help="of each engine; default: 3")
    add("--engines", type=partial(chosen, ENGINES), default=list(ENGINES), metavar="NAME,NAME",
        help=f"some of {', '.join(ENGINES)}; default: all. The loop is for digits and resnet")  # fmt: skip
    add("--epochs", type=_numbers, default=[1, 20], metavar="N,N",
        help="local epochs of digits: how large the clients are; default: 1,20")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of resnet; cpu is to rehearse it")
    add("--data", type=Path, metavar="FILE", help="images of resnet, as gpu.py takes them")
    add("--json", type=json_file, metavar="FILE", help="also write the figures there, after each part")
    add("--quick", action="store_true", help="tiny: shows that everything runs, the figures mean nothing")
    options = parser.parse_args()
    options.engines = available(options.engines)
    options.runs = options.runs or (1 if options.quick else 3)
    return options


if __name__ == "__main__":
    sys.exit(main())
