"""What gpu_mod adds to a message: the same app with and without it, side by side in one run.

Two parts: a ClientApp that is called in its own process, for each start method (``direct``), and rounds of
the Ray Simulation Runtime (``ray``). See README.md beside this file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import stub, table
from benchmarks.shared.driver import Figures, Options, Parser, positive, run, sizes_mb
from benchmarks.shared.processes import ROOT, BenchmarkError, Member, members, ray_environment

METHODS = ["fork", "forkserver", "spawn"]
_LEASED = "forkserver, leased"
_UNTIMED = 3  # the first calls start the fork server and teach it
_TIMEOUT_S = 300.0
_SIMULATION_TIMEOUT_S = 1800.0


def main() -> int:
    quick = {"sizes": [0.1], "runs": 1, "clients": 2, "rounds": 1, "actors": 1}
    cores = len(os.sched_getaffinity(0))
    full = {"sizes": [1.0, 45.0], "runs": 15, "clients": 20, "rounds": 5, "actors": cores}
    parser = Parser("mod", __doc__, list(_PARTS), quick=quick, full=full)
    add = parser.add_argument
    add("--sizes", type=sizes_mb, metavar="MB,MB", help="weights in MB; default: 1,45")
    add("--runs", type=positive, metavar="N", help="timed calls of each start method; default: 15")
    add("--clients", type=positive, metavar="N", help="of the simulation; default: 20")
    add("--rounds", type=positive, metavar="N", help="timed rounds with the mod, and without; default: 5")
    add("--actors", type=positive, metavar="N", help="of the simulation; default: one per core")
    parts = {name: partial(_measure, name) for name in _PARTS}
    return run(parser, parser.parse(), parts, {part: [] for part in _PARTS})


def _measure(part: str, options: Options, figures: Figures) -> None:
    for size_mb in options.sizes:
        with tempfile.TemporaryDirectory(prefix="fgpu-") as folder:
            rows = _PARTS[part](options, size_mb, Path(folder))
        _show(part, size_mb, rows)
        figures[part] += rows


def _direct(options: Options, size_mb: float, folder: Path) -> list[dict[str, Any]]:
    """Time calls of a ClientApp; the callers of all start methods take turns."""
    starts = {method: partial(Member, method, "mod.caller", method, size_mb) for method in METHODS}
    with suppress(RuntimeError):  # no C compiler for the stub GPU
        env = {**os.environ, **stub.host(folder).env}
        starts[_LEASED] = partial(Member, _LEASED, "mod.caller", "forkserver", size_mb, env=env)
    seconds: dict[str, dict[str, list[float]]] = {name: {"without": [], "with": []} for name in starts}
    with members(starts.values()) as callers:
        for number in range(0 if options.quick else -_UNTIMED, options.runs):
            for caller in callers:
                reply = caller.ask(_TIMEOUT_S, reversed=bool(number % 2))
                if number >= 0:
                    for way, value in reply.items():
                        seconds[caller.name][way].append(value)
    return [{"start_method": name, **_row(size_mb, values)} for name, values in seconds.items()]


def _ray(options: Options, size_mb: float, folder: Path) -> list[dict[str, Any]]:
    """Time the rounds of a simulation, in which every other one is with the mod."""
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed and left out: pip install 'flwr[simulation]'", file=sys.stderr)
        return []
    counts = options.clients, options.rounds, options.actors
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mod.rounds", str(size_mb), *map(str, counts)],
        cwd=ROOT,
        env={**os.environ, **ray_environment(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=_SIMULATION_TIMEOUT_S,
    )
    if done.returncode:
        raise BenchmarkError(f"the simulation ended with status {done.returncode}\n{done.stderr[-4000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"without"'))
    rounds: dict[str, list[float]] = json.loads(line)
    per_message = {way: [value / options.clients for value in values] for way, values in rounds.items()}
    return [dict(zip(("clients", "rounds", "actors"), counts, strict=True)) | _row(size_mb, per_message)]


def _row(size_mb: float, seconds: dict[str, list[float]]) -> dict[str, Any]:
    without, with_mod = (median(seconds[way]) for way in ("without", "with"))
    return {
        "weights_mb": size_mb,
        "runs": len(seconds["with"]),
        "without_s": round(without, 6),
        "with_s": round(with_mod, 6),
        "with_min_s": round(min(seconds["with"]), 6),
        "with_max_s": round(max(seconds["with"]), 6),
        "added_s": round(with_mod - without, 6),
        "ratio": round(with_mod / without, 2),
    }


_PARTS = {"direct": _direct, "ray": _ray}


def _show(part: str, size_mb: float, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    if part == "direct":
        title, first = f"a ClientApp called directly, {size_mb:g} MB of weights, per message", "start_method"
    else:
        counts = "{clients} clients, {rounds} rounds, {actors} actors".format(**rows[0])
        title, first = f"Simulation Runtime, {counts}, {size_mb:g} MB of weights, per message", "actors"
    times = "without_s", "with_s", "with_min_s", "with_max_s", "added_s"
    table.show(
        title,
        (first.replace("_", " "), "without the mod", "with it", "min", "max", "added", "ratio", "runs"),
        [
            (row[first], *(table.seconds(row[key]) for key in times), f"{row['ratio']:.1f}x", row["runs"])
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
