"""A simulation on two hosts of a Ray cluster, and the same on one machine with the same cores, in turn.

Parts: overhead (time of a round and of the command), wire (bytes between the hosts, CPUs and memory), costs
(of a message, a round, a MB of the model), idle (of a host that waits), many (the driver with many hosts).
README.md says what is measured.
"""

from __future__ import annotations

import os
import sys

from benchmarks.cluster import costs, many, network, overhead
from benchmarks.shared.driver import Figures, Options, Parser, positive, run


def main() -> int:
    parser = Parser("cluster", __doc__, list(_PARTS), quick={"runs": 1}, full={"runs": 3})
    parser.add_argument("--runs", type=positive, metavar="N", help="of each way; default: 3")
    options = parser.parse()
    if sys.platform == "linux":
        os.sched_setaffinity(0, network.cpus())  # one machine has what two hosts have
    return run(parser, options, _PARTS, {"quick": options.quick})


def _overhead(options: Options, figures: Figures) -> None:
    chosen = overhead.sizes(is_quick=options.quick)
    figures["overhead"], figures["overhead-ratios"] = overhead.measure(chosen, options.runs)


def _wire(options: Options, figures: Figures) -> None:
    figures["wire"] = overhead.measure_wire(overhead.wire_runs(is_quick=options.quick))


def _costs(options: Options, figures: Figures) -> None:
    figures["costs"] = costs.measure(*(costs.QUICK_SIZE if options.quick else costs.SIZE))


def _idle(options: Options, figures: Figures) -> None:
    figures["idle"] = costs.measure_idle(*(costs.QUICK_IDLE if options.quick else costs.IDLE))


def _many(options: Options, figures: Figures) -> None:
    figures["many"] = many.measure(many.QUICK_SIZES if options.quick else many.SIZES)


_PARTS = {"overhead": _overhead, "wire": _wire, "costs": _costs, "idle": _idle, "many": _many}


if __name__ == "__main__":
    sys.exit(main())
