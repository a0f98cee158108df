"""Leases under load, on GPUs that a stub of NVIDIA's library plays: no GPU is needed.

Three parts: many processes with random requests, of which a third is killed (``crowd``), one that has no
competition (``alone``), and many that wait (``waiting``). See README.md beside this file.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from benchmarks.shared import stub, table
from benchmarks.shared.driver import Figures, Options, Parser, positive, run
from benchmarks.shared.processes import BenchmarkError, Member

GPUS = 2
_PART_TIMEOUT_S = 600.0
_TITLES = {
    "crowd": "{processes} processes with random requests, a third of them killed",
    "alone": "acquire and release without competition, {runs} times",
    "waiting": "{waiters} processes that wait {seconds} s, then hold a GPU for 10 ms each",
}


def main() -> int:
    parser = Parser("leases", __doc__)
    add = parser.add_argument
    add("--processes", type=positive, default=200, metavar="N", help="of the crowd; default: 200")
    add("--waiters", type=positive, default=500, metavar="N", help="that wait in line; default: 500")
    add("--seconds", type=positive, default=20, metavar="S", help="how long they wait; default: 20")
    add("--runs", type=positive, default=500, metavar="N", help="acquire and release; default: 500")
    add("--seed", type=positive, metavar="N", help="of what is random; default: another one each time")
    options = parser.parse()
    options.seed = options.seed or random.SystemRandom().randrange(1, 10**9)
    return run(parser, options, {"leases": _measure}, {"seed": options.seed})


def _measure(options: Options, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(prefix="fgpu-bench-") as folder:
        stub.move_to(stub.host(Path(folder), gpus=GPUS))
        member = Member("leases", "leases.parts", options.seed)
        try:
            member.wait_until_ready()
            for part, arguments in {
                "crowd": {"processes": options.processes},
                "alone": {"runs": options.runs},
                "waiting": {"waiters": options.waiters, "seconds": options.seconds},
            }.items():
                found = member.ask(_PART_TIMEOUT_S, part=part, **arguments)
                table.show_figures(_TITLES[part].format(**arguments), found)
                figures |= found
        finally:
            member.close()
    if broken := [name for name in ("over_capacity_instants", "unfinished", "left_over") if figures[name]]:
        raise BenchmarkError(f"not 0: {', '.join(broken)}")


if __name__ == "__main__":
    sys.exit(main())
