"""Simulations by `flower-gpu simulate`, and by Flower's Simulation Runtime with Ray, in alternation.

Parts: no-op (time and memory of messages), digits (small clients, beside a plain loop), ordinary (an app
like most), order (clients of different sizes), fedbuff (slow clients), deterministic (cost of that option),
batches (several small networks in one step), resnet (ResNet-18 on a GPU). README.md in the folder above
explains the figures.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from benchmarks.shared.driver import Parser, chosen, positives, run
from benchmarks.simulation import batches, deterministic, fedbuff, no_op, order, resnet, training
from benchmarks.simulation.engines import ENGINES, available


def main() -> int:
    parser = Parser("simulation", __doc__, _PARTS, quick={"runs": 1}, full={"runs": 3})
    add = parser.add_argument
    add("--engines", type=partial(chosen, ENGINES), default=list(ENGINES), metavar="NAME,NAME",
        help=f"run only these engines: {', '.join(ENGINES)}; default: all. The loop only trains")  # fmt: skip
    add("--epochs", type=positives, default=[1, 20], metavar="N,N",
        help="numbers of local epochs of digits; default: 1,20")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device of resnet; cpu is for rehearsals")
    add("--model", choices=("resnet18", "elementwise"), default="resnet18",
        help="model of resnet; elementwise is for a stand-in for CUDA")  # fmt: skip
    add("--data", type=Path, metavar="FILE", help="images of resnet and fedbuff, as for benchmarks.gpu")
    options = parser.parse()
    options.engines = available(options.engines)
    return run(parser, options, _PARTS)


_PARTS = {
    "no-op": no_op.measure,
    "digits": training.measure_digits,
    "ordinary": training.measure_ordinary,
    "order": order.measure,
    "fedbuff": fedbuff.measure,
    "deterministic": deterministic.measure,
    "batches": batches.measure,
    "resnet": resnet.measure,
}


if __name__ == "__main__":
    sys.exit(main())
