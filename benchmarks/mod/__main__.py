"""Cost of gpu_mod per message, in rounds of Flower's Simulation Runtime with Ray.

Rounds with and without the mod alternate on the same actors. README.md in the folder above explains the
figures.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options, Parser, positive, run, sizes_mb
from benchmarks.shared.processes import BenchmarkError, flower_environment, ray_environment

_TIMEOUT_S = 1800.0


def main() -> int:
    quick = {"sizes": [0.1], "clients": 2, "rounds": 1, "actors": 1}
    cores = len(os.sched_getaffinity(0))
    full = {"sizes": [1.0, 45.0], "clients": 20, "rounds": 5, "actors": cores}
    parser = Parser("mod", __doc__, ("ray",), quick=quick, full=full)
    add = parser.add_argument
    add("--sizes", type=sizes_mb, metavar="MB,MB", help="sizes of the weights; default: 1,45")
    add("--clients", type=positive, metavar="N", help="number of clients; default: 20")
    add("--rounds", type=positive, metavar="N", help="timed rounds with and without the mod; default: 5")
    add("--actors", type=positive, metavar="N", help="number of Ray's actors; default: one per core")
    return run(parser, parser.parse(), {"ray": _measure})


def _measure(options: Options, figures: Figures) -> None:
    if importlib.util.find_spec("ray") is None:
        raise BenchmarkError("Ray is not installed: pip install 'flwr[simulation]'")
    figures["ray"] = [_row(options, size_mb) for size_mb in options.sizes]
    table.show(f"seconds per message, {options.clients} clients, {options.actors} actors", figures["ray"])


def _row(options: Options, size_mb: float) -> dict[str, Any]:
    counts = {"clients": options.clients, "rounds": options.rounds, "actors": options.actors}
    with tempfile.TemporaryDirectory(prefix="fgpu-") as folder:
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.mod.rounds", str(size_mb), *map(str, counts.values())],
            env={**flower_environment(), **ray_environment(Path(folder))},
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    if process.returncode:
        raise BenchmarkError(f"the simulation exited with {process.returncode}\n{process.stderr[-4000:]}")
    line = next(line for line in process.stdout.splitlines() if line.startswith('{"without"'))
    seconds = {way: [value / options.clients for value in values] for way, values in json.loads(line).items()}
    without_s, with_s = median(seconds["without"]), median(seconds["with"])
    return {
        **counts,
        "weights_mb": size_mb,
        "without_s": round(without_s, 6),
        "with_s": round(with_s, 6),
        "with_min_s": round(min(seconds["with"]), 6),
        "with_max_s": round(max(seconds["with"]), 6),
        "added_s": round(with_s - without_s, 6),
        "ratio": round(with_s / without_s, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
