"""A simulation by `flower-gpu simulate`, and the same app by Flower's Simulation Runtime with Ray, in turn.

Parts: no-op (what a message costs, and memory), many (10,000 clients), digits (small clients, beside a plain
loop), ordinary (an app as most are written), accuracy (the models of both), failures (clients that fail),
order (clients of different sizes, the longest first), fedbuff (slow clients that nobody waits for),
deterministic (what that option costs), batches (small networks, several clients in one step), resnet (on a
GPU). README.md says what is measured.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from benchmarks.shared import machine
from benchmarks.shared.driver import Figures, Options, Parser, chosen, positive, positives, run, write
from benchmarks.simulation import (
    batches,
    deterministic,
    digits,
    failures,
    fedbuff,
    no_op,
    order,
    ordinary,
    resnet,
)
from benchmarks.simulation.engines import ENGINES, available


def main() -> int:
    parser = Parser("simulation", __doc__, list(_PARTS), quick={"runs": 1}, full={"runs": 3})
    add = parser.add_argument
    add("--runs", type=positive, metavar="N", help="of each engine; default: 3")
    add("--engines", type=partial(chosen, ENGINES), default=list(ENGINES), metavar="NAME,NAME",
        help=f"some of {', '.join(ENGINES)}; default: all. The loop only trains")  # fmt: skip
    add("--epochs", type=positives, default=[1, 20], metavar="N,N",
        help="local epochs of digits: how large the clients are; default: 1,20")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of resnet; cpu is to rehearse it")
    add("--model", choices=("resnet18", "elementwise"), default="resnet18",
        help="of resnet; elementwise is for a stand-in for CUDA, as of benchmarks.gpu")  # fmt: skip
    add(
        "--data", type=Path, metavar="FILE", help="images of resnet and fedbuff, as benchmarks.gpu takes them"
    )
    options = parser.parse()
    options.engines = available(options.engines)
    return run(parser, options, _PARTS, {"quick": options.quick})


def _no_op(options: Options, figures: Figures) -> None:
    sizes = no_op.QUICK_SIZES if options.quick else no_op.SIZES
    figures["no-op"], figures["no-op-ratios"] = no_op.measure(sizes, options.engines, options.runs)


def _many(options: Options, figures: Figures) -> None:
    figures["many"] = no_op.measure_many(no_op.QUICK_MANY if options.quick else no_op.MANY)


def _digits(options: Options, figures: Figures) -> None:
    size = digits.QUICK_DIGITS if options.quick else digits.DIGITS
    calls = digits.QUICK_CALLS if options.quick else digits.CALLS
    figures["digits"] = digits.measure(*size, options.engines, options.epochs, options.runs, calls)


def _ordinary(options: Options, figures: Figures) -> None:
    sizes, calls = ordinary.SIZES, ordinary.CALLS
    if options.quick:
        sizes, calls = ordinary.QUICK_SIZES, ordinary.QUICK_CALLS
    figures["ordinary"] = ordinary.measure(sizes, options.engines, options.runs, calls)


def _accuracy(options: Options, figures: Figures) -> None:
    counts = digits.QUICK_ACCURACY if options.quick else digits.ACCURACY
    seeds = digits.QUICK_SEEDS if options.quick else digits.SEEDS
    figures["accuracy"] = digits.measure_accuracy(*counts, seeds, options.engines)
    digits.check_near(figures["accuracy"])


def _failures(options: Options, figures: Figures) -> None:
    figures["failures"] = failures.measure(*(failures.QUICK_SIZE if options.quick else failures.SIZE))


def _order(options: Options, figures: Figures) -> None:
    size, seeds = (order.QUICK_SIZE, order.QUICK_SEEDS) if options.quick else (order.SIZE, order.SEEDS)
    figures["order"] = order.measure(*size, seeds)


def _fedbuff(options: Options, figures: Figures) -> None:
    size, seeds = fedbuff.SIZE, fedbuff.SEEDS
    if options.quick:
        size, seeds = fedbuff.QUICK_SIZE, fedbuff.QUICK_SEEDS
    figures["fedbuff"] = fedbuff.measure(size, seeds, options.data, is_quick=options.quick)


def _deterministic(options: Options, figures: Figures) -> None:
    sizes = deterministic.QUICK_SIZES if options.quick else deterministic.SIZES
    figures["deterministic"] = deterministic.measure(sizes, options.runs)


def _batches(options: Options, figures: Figures) -> None:
    size, networks = batches.SIZE, batches.NETWORKS
    if options.quick:
        size, networks = batches.QUICK_SIZE, batches.QUICK_NETWORKS
    figures["batches"] = batches.measure(size, networks, options.runs)


def _resnet(options: Options, figures: Figures) -> None:
    figures["resnet"] = []
    if options.device == "cuda" and not machine.gpu_models():
        print("\nresnet is left out: there is no NVIDIA GPU here", file=sys.stderr)
        return

    def tell(rows: resnet.Rows) -> None:
        figures["resnet"] = rows
        write(options, figures)

    arguments = options.device, options.model, options.data, options.engines, options.runs
    resnet.measure(*arguments, tell, quick=options.quick)


_PARTS = {
    "no-op": _no_op,
    "many": _many,
    "digits": _digits,
    "ordinary": _ordinary,
    "accuracy": _accuracy,
    "failures": _failures,
    "order": _order,
    "fedbuff": _fedbuff,
    "deterministic": _deterministic,
    "batches": _batches,
    "resnet": _resnet,
}


if __name__ == "__main__":
    sys.exit(main())
