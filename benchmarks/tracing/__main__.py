"""Cost of the trace: the same simulation with and without it, in alternation.

Parts: no-op (clients that do nothing, the worst case), digits (clients that train). README.md in the folder
above explains the figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.app import copy_app
from benchmarks.shared.driver import Figures, Options, Parser, in_turn, medians, run
from benchmarks.shared.processes import BenchmarkError, end_servers, flower_environment, new_state_folder
from flower_gpu import trace

#: Client of the app, number of clients, and run config.
_PARTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "no-op": ("no_op", 100, {"num-server-rounds": 3}),
    "digits": ("digits", 40, {"num-server-rounds": 3, "local-epochs": 20}),
}
_TIMEOUT_S = 600.0
_LINES = 2000
#: Without the trace, this program's writer does nothing, and no thread samples the GPUs.
_PROGRAM = """
import json, os, sys, time
from flower_gpu import simulate, trace
from flower_gpu.apps import recording
app, clients, config, folder, way = json.loads(sys.argv[1])
if way == "off":
    trace.append = lambda *_: None
    recording.look_at_gpus = lambda _: False
began = time.perf_counter()
simulate(app, clients, run_config=config, calls_per_worker=1, log_dir=folder, seed=0, progress=False)
seconds = time.perf_counter() - began
own = os.times()
print(json.dumps({"s": seconds, "cpu_s": own.user + own.system}))
"""


def main() -> int:
    parser = Parser("tracing", __doc__, _PARTS, quick={"runs": 1}, full={"runs": 7})
    parts = {part: partial(_measure, part) for part in _PARTS}
    return run(parser, parser.parse(), parts, figures={"rows": []})


def _measure(part: str, options: Options, figures: Figures) -> None:
    client, clients, config = _PARTS[part]
    if options.quick:
        clients, config = 4, {**config, "num-server-rounds": 1}
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _, way in in_turn(found, options.runs):
        found[way].append(_run(client, clients, config, way))
    on, off = found["on"], found["off"]
    row = {
        "part": part,
        "clients": clients,
        "rounds": config["num-server-rounds"],
        "runs": options.runs,
        **{f"{way}_{name}": value for way, runs in found.items() for name, value in medians(runs).items()},
        # The runs of a pair followed each other, so other load on the machine affected both.
        "ratio": round(median(a["s"] / b["s"] for a, b in zip(on, off, strict=True)), 4),
        "line_us": round(_line_us(), 2),
    }
    row["written_percent"] = round(row["on_lines"] * row["line_us"] / 1e4 / row["on_s"], 3)
    table.show(f"trace of {clients} clients", [row])
    figures["rows"].append(row)


def _run(client: str, clients: int, config: dict[str, Any], way: str) -> dict[str, float]:
    new_state_folder()
    with tempfile.TemporaryDirectory(prefix="fgpu-trace-") as name:
        folder = Path(name)
        config = {**config, "num-clients": clients, "strategy": "ours", "figures": f"{name}/figures.json"}
        arguments = json.dumps([str(copy_app(client, folder)), clients, config, name, way])
        try:
            process = subprocess.run(
                [sys.executable, "-c", _PROGRAM, arguments],
                env=flower_environment(),
                capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        finally:
            end_servers()
        if process.returncode:
            raise BenchmarkError(f"{client}, {way}: status {process.returncode}\n{process.stderr[-4000:]}")
        lines = sum(1 for path in folder.glob(f"*/{trace.FILE_NAME}") for _ in trace.read(path))
        if (way == "on") != (lines > 0):
            raise BenchmarkError(f"{client}, trace {way}: the trace has {lines} lines")
        return {**json.loads(process.stdout.splitlines()[-1]), "lines": lines}


def _line_us() -> float:
    """Return the time to write one line, in microseconds."""
    fields = {"call": "0123456789ab", "client": "12", "task": "train", "round": 3, "pid": 12345}
    times_us = []
    with tempfile.TemporaryDirectory(prefix="fgpu-trace-") as folder:
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(_LINES):
                trace.write_to(folder, "worker_started", **fields, start_method="forkserver", threads=1)
            times_us.append((time.perf_counter() - began) / _LINES * 1e6)
    return median(times_us)


if __name__ == "__main__":
    sys.exit(main())
