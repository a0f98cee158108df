"""Cost of running each call in its own process: flower-gpu and other ways, in alternation.

Parts: calls (time of one call), client (time of a fit of a realistic client), cudnn (cost of loading
cuDNN's libraries). README.md in the folder above explains the figures.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.isolation import calls, client, cudnn
from benchmarks.isolation.ways import WAYS
from benchmarks.shared.driver import Figures, Options, Parser, chosen, positive, run, sizes_mb


def main() -> int:
    known = list(WAYS)
    quick, full = {"sizes": [0.1], "runs": 1}, {"sizes": [0.25, 45.0, 500.0]}
    parser = Parser("isolation", __doc__, _PARTS, quick=quick, full=full)
    add = parser.add_argument
    add("--sizes", type=sizes_mb, metavar="MB,MB", help="sizes of the weights; default: 0.25,45,500")
    add("--ways", type=partial(chosen, known), default=known, metavar="WAY,WAY",
        help=f"run only these ways: {', '.join(known)}; default: all")  # fmt: skip
    add("--runs", type=positive, metavar="N", help="timed calls per way; the default depends on size and way")
    return run(parser, parser.parse(), _PARTS)


def _calls(options: Options, figures: Figures) -> None:
    figures["calls"] = []
    for size_mb in options.sizes:
        figures["calls"] += calls.measure(size_mb, options.ways, options.runs, is_quick=options.quick)


def _client(options: Options, figures: Figures) -> None:
    figures["client"] = client.measure(options.ways, is_quick=options.quick)


def _cudnn(options: Options, figures: Figures) -> None:
    figures["cudnn"] = cudnn.measure(options.runs or 20)


_PARTS = {"calls": _calls, "client": _client, "cudnn": _cudnn}

if __name__ == "__main__":
    sys.exit(main())
