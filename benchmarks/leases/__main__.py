"""Leases under load, on stub GPUs of 16 GiB, with real processes. Needs a C compiler, but no GPU.

Parts: crowd (200 processes with random requests, a third of them killed), alone (acquire and release
without competition), waiting (500 processes in the queue).
README.md in the folder above explains the figures.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.shared import stub, table
from benchmarks.shared.driver import Figures, Options, Parser, positive, run
from benchmarks.shared.processes import BenchmarkError, Member

_TIMEOUT_S = 600.0
#: Options that each part gets.
_OPTIONS = {"crowd": ("processes",), "alone": ("runs",), "waiting": ("waiters", "seconds")}
_MUST_BE_ZERO = ("over_capacity_instants", "over_used_instants", "seen_twice", "unfinished", "left_over")


def main() -> int:
    quick = {"processes": 24, "waiters": 8, "seconds": 1, "runs": 5}
    full = {"processes": 200, "waiters": 500, "seconds": 20, "runs": 500}
    parts = {name: partial(_measure, name) for name in _OPTIONS}
    parser = Parser("leases", __doc__, parts, quick=quick, full=full)
    add = parser.add_argument
    add("--processes", type=positive, metavar="N", help="processes of crowd; default: 200")
    add("--waiters", type=positive, metavar="N", help="processes of waiting; default: 500")
    add("--seconds", type=positive, metavar="S", help="how long they wait; default: 20")
    add("--seed", type=positive, metavar="N", help="seed of the random choices; default: a new one")
    options = parser.parse()
    options.seed = options.seed or random.SystemRandom().randrange(1, 10**9)
    return run(parser, options, parts, figures={"seed": options.seed})


def _measure(part: str, options: Options, figures: Figures) -> None:
    """Run a part in a member. All its processes are forks of it, so it has to be small."""
    arguments = {name: getattr(options, name) for name in _OPTIONS[part]}
    env = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="fgpu-bench-") as folder:
        try:
            stub.move_to(stub.host(Path(folder), gpus=2))
            member = Member("leases", "leases.parts", options.seed)
            try:
                member.wait_until_ready()
                found = member.ask(_TIMEOUT_S, part=part, **arguments)
            finally:
                member.close()
        finally:
            os.environ.clear()
            os.environ.update(env)
    table.show_figures(f"{part}, {', '.join(f'{value} {name}' for name, value in arguments.items())}", found)
    figures[part] = found
    if broken := [name for name in _MUST_BE_ZERO if found.get(name)]:
        raise BenchmarkError(f"these must be 0: {', '.join(broken)}")


if __name__ == "__main__":
    sys.exit(main())
