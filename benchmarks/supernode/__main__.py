"""Cost of a message to a SuperNode: Flower's own, `flower-gpu supernode`, and `flower-gpu launch`.

Parts: no-op (clients that import torch and do nothing), ordinary (clients that train), memory (idle
SuperNodes). The ways alternate. README.md in the folder above explains the figures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import driver, memory, table
from benchmarks.shared.app import config_pairs, copy_app
from benchmarks.shared.driver import Figures, Options, Parser, chosen, in_turn, medians, positive, run
from benchmarks.shared.member import QUICK
from benchmarks.shared.processes import BenchmarkError, new_state_folder
from benchmarks.supernode.federation import MessageTime, environment, federation, fork_servers, settled_mb

_CLIENTS = {"no-op": "no_op_torch", "ordinary": "ordinary"}
_PARTS = ("no-op", "ordinary", "memory")
_COUNTS = (6, 12, 100)
_WAYS = ("flower", "ours", "launch")
#: Two cores cannot run a hundred of Flower's SuperNodes.
_MAX_FLOWER_NODES = 12
_TIMEOUT_S = 900.0


def main() -> int:
    quick = {"supernodes": [1], "ways": ["ours", "launch"], "rounds": 1, "runs": 1}
    full = {"supernodes": list(_COUNTS), "ways": list(_WAYS), "rounds": 3, "runs": 3}
    parser = Parser("supernode", __doc__, _PARTS, quick=quick, full=full)
    add = parser.add_argument
    add("--supernodes", type=driver.positives, metavar="N,N", help="numbers of SuperNodes; default: 6,12,100")
    add("--ways", type=partial(chosen, _WAYS), metavar="WAY,WAY",
        help=f"run only these of {', '.join(_WAYS)}; default: all. flower has at most 12 nodes")  # fmt: skip
    add("--rounds", type=positive, metavar="N", help="rounds of each run; default: 3")
    parts = {part: partial(_measure, part) for part in _PARTS}
    return run(parser, parser.parse(), parts, figures={"rows": [], "memory": []})


def _measure(part: str, options: Options, figures: Figures) -> None:
    for count in options.supernodes:
        ways = [way for way in options.ways if way != "flower" or count <= _MAX_FLOWER_NODES]
        if part == "memory":
            ways = [way for way in ways if way != "launch"]
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _, way in in_turn(ways, options.runs):
            with _folder() as folder:
                if part == "memory":
                    found[way].append(_idle(way, count, folder))
                else:
                    found[way].append(_run(part, way, count, options.rounds, folder))
        names = {} if part == "memory" else {"app": part}
        rows = [
            {**names, "way": way, "supernodes": count, "rounds": options.rounds, "runs": options.runs}
            | medians(runs)
            for way, runs in found.items()
        ]
        if part != "memory":
            for row in rows:
                row["all_total_s"] = [round(each["total_s"], 2) for each in found[row["way"]]]
                row["faster"] = round(rows[0]["whole_s"] / row["whole_s"], 2)
        figures["memory" if part == "memory" else "rows"] += rows
        table.show(f"{part}, {count} SuperNodes", rows)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fgpu-nodes-") as name:
        new_state_folder()
        yield Path(name)


def _idle(way: str, count: int, folder: Path) -> dict[str, float]:
    """Return the memory of idle SuperNodes, and the time until all are registered."""
    with federation(way, count, environment(str(folder)), folder) as nodes:
        mb = settled_mb(nodes.nodes)
        return {
            "registered_s": nodes.registered_s,
            "mb": mb,
            "mb_per_supernode": mb / count,
            "fork_server_mb": memory.proportional_mb(fork_servers()),
        }


def _run(part: str, way: str, count: int, rounds: int, folder: Path) -> dict[str, float]:
    """Run the app once and return its figures."""
    env = environment(str(folder))
    app = copy_app(_CLIENTS[part], folder)
    figures = folder / "figures.json"
    config = {"num-server-rounds": rounds, "num-clients": count, "figures": str(figures)}
    if part == "no-op":
        config |= {"model-mb": 0.004, "arrays": 1}
    # Sampling takes time from the rounds. The memory of no-op is that of its SuperNodes anyway.
    sampling = memory.Sampler() if part == "ordinary" else nullcontext()
    began = time.monotonic()
    with sampling as sampler:
        run_app = _launch if way == "launch" else partial(_run_in_federation, way)
        found = run_app(app, count, rounds, config, env, folder)
    whole_s = time.monotonic() - began - found.get("again_total_s", 0.0)
    rounds_s = json.loads(figures.read_text())["rounds_s"]
    peak = {} if sampler is None else {"peak_mb": sampler.peak_mb}
    return {"whole_s": whole_s, **found, "strategy_s": sum(rounds_s), "round_s": median(rounds_s), **peak}


def _run_in_federation(
    way: str,
    app: Path,
    count: int,
    rounds: int,
    config: Mapping[str, Any],
    env: Mapping[str, str],
    folder: Path,
) -> dict[str, float]:
    def timed(config: Mapping[str, Any]) -> float:
        command = ["flwr", "run", str(app), "bench", "--stream", "--run-config", config_pairs(config)]
        return _timed(command, env, f"Received {count} results and 0 failures", rounds)

    with federation(way, count, env, folder) as nodes:
        cpu_time = MessageTime(nodes.nodes)
        found = {"registered_s": nodes.registered_s, "total_s": timed(config)}
        # In the first run the fork server imports libraries, so the CPU time is that of a second run.
        if way == "ours" and QUICK not in os.environ:
            cpu_time = MessageTime(nodes.nodes)
            again = folder / "again.json"
            found["again_total_s"] = timed({**config, "figures": str(again)})
            found["again_strategy_s"] = sum(json.loads(again.read_text())["rounds_s"])
        time.sleep(1.0)  # The last processes exit.
        return {**found, "cpu_s_per_message": cpu_time.used_s() / (count * rounds)}


def _launch(
    app: Path, count: int, rounds: int, config: Mapping[str, Any], env: Mapping[str, str], folder: Path
) -> dict[str, float]:
    command = [sys.executable, "-m", "flower_gpu.cli", "launch", str(app), "--log-dir", str(folder)]
    command += ["--clients", str(count), "--rounds", str(rounds), "--run-config"]
    # Its own options set the numbers of clients and rounds.
    command.append(
        config_pairs({name: value for name, value in config.items() if not name.startswith("num-")})
    )
    return {"total_s": _timed(command, env, rf"train +{count}/{count} clients", rounds)}


def _timed(command: list[str], env: Mapping[str, str], line: str, rounds: int) -> float:
    """Run a command that prints a line for each complete round; return its seconds."""
    began = time.monotonic()
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=os.sep)
    total_s = time.monotonic() - began
    log = f"{process.stdout}\n{process.stderr}"
    if process.returncode or len(re.findall(line, log)) < rounds:
        raise BenchmarkError(f"{command}: not all clients replied in all rounds\n{log[-4000:]}")
    return total_s


if __name__ == "__main__":
    sys.exit(main())
