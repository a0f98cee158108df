"""What a process per call costs: flower-gpu and the other ways, side by side in one run.

Four parts: the time of one call (``calls``), that of a fit of a real client (``client``), the memory of
clients that wait (``memory``), and what cuDNN's libraries cost a worker (``cudnn``). See README.md in the
folder above.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.isolation import calls, client, cudnn, idle
from benchmarks.isolation.ways import WAYS, usable
from benchmarks.shared.driver import Figures, Options, Parser, chosen, positive, run, sizes_mb


def main() -> int:
    known = usable()
    full = {"sizes": [0.25, 45.0, 500.0]}
    parser = Parser("isolation", __doc__, list(_PARTS), quick={"sizes": [0.1], "runs": 1}, full=full)
    add = parser.add_argument
    add("--sizes", type=sizes_mb, metavar="MB,MB", help="weights in MB; default: 0.25,45,500")
    add("--ways", type=partial(chosen, known), default=known, metavar="WAY,WAY",
        help=f"some of {', '.join(known)}; default: all")  # fmt: skip
    add("--runs", type=positive, metavar="N", help="timed runs of each way; default: by size and way")
    options = parser.parse()
    if left_out := WAYS.keys() - known:
        print(f"not installed and left out: {', '.join(sorted(left_out))}", file=sys.stderr)
    return run(parser, options, _PARTS, {part: [] for part in _PARTS})


def _calls(options: Options, figures: Figures) -> None:
    for size_mb in options.sizes:
        figures["calls"] += calls.measure(size_mb, options.ways, options.runs, warm=not options.quick)


def _client(options: Options, figures: Figures) -> None:
    figures["client"] = client.measure(options.ways, quick=options.quick)


def _memory(options: Options, figures: Figures) -> None:
    figures["memory"] = idle.measure(options.ways, quick=options.quick)


def _cudnn(options: Options, figures: Figures) -> None:
    figures["cudnn"] = cudnn.measure(options.runs or 20)


_PARTS = {"calls": _calls, "client": _client, "memory": _memory, "cudnn": _cudnn}

if __name__ == "__main__":
    sys.exit(main())
