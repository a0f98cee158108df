"""What the trace of a run costs: the same simulation with and without it, in turn.

Clients do nothing (the worst case: a worker takes some 20 ms) or train on digits. README.md says what is
measured.
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
from benchmarks.shared.driver import Figures, Options, Parser, in_turn, positive, run
from benchmarks.shared.processes import BenchmarkError, end_servers, new_state_folder
from benchmarks.simulation.engines import environment
from flower_gpu import trace

_APPS = Path(__file__).parents[1] / "simulation" / "apps"
_PARTS = {
    "no-op": ("no_op", 100, {"model-mb": 1.0, "num-server-rounds": 3}),
    "digits": ("digits", 40, {"num-server-rounds": 3, "local-epochs": 20}),
}
_TIMEOUT_S = 600.0
# "off" is the same program with a writer that writes nothing, and nobody who looks at the GPUs.
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
print(json.dumps({"seconds": seconds, "own_cpu_s": own.user + own.system}))
"""


def main() -> int:
    parser = Parser("tracing", __doc__, list(_PARTS), quick={"runs": 1}, full={"runs": 7})
    parser.add_argument("--runs", type=positive, metavar="N", help="with and without each; default: 7")
    options = parser.parse()
    parts = {part: partial(_measure, part) for part in _PARTS}
    return run(parser, options, parts, {"quick": options.quick, "rows": []})


def _measure(part: str, options: Options, figures: Figures) -> None:
    app, clients, config = _PARTS[part]
    if options.quick:
        clients, config = 4, {**config, "num-server-rounds": 1}
    done: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _, way in in_turn(done, options.runs):
        done[way].append(_run(app, clients, config, way))
    # Each pair ran side by side: what the machine did otherwise meanwhile hit both.
    pairs = list(zip(done["on"], done["off"], strict=True))
    row = {
        "part": part,
        "clients": clients,
        "rounds": config["num-server-rounds"],
        "runs": options.runs,
        "lines": int(done["on"][-1]["lines"]),
        "on_s": round(median(each["seconds"] for each in done["on"]), 3),
        "off_s": round(median(each["seconds"] for each in done["off"]), 3),
        "ratio": round(median(on["seconds"] / off["seconds"] for on, off in pairs), 4),
        "on_cpu_s": round(median(each["own_cpu_s"] for each in done["on"]), 3),
        "off_cpu_s": round(median(each["own_cpu_s"] for each in done["off"]), 3),
        "line_us": round(_line_us(), 2),
    }
    row["written_percent"] = round(row["lines"] * row["line_us"] / 1e4 / row["on_s"], 3)
    columns = ("on_s", "off_s", "ratio", "on_cpu_s", "off_cpu_s", "lines", "line_us", "written_percent")
    table.show(f"tracing, {clients} clients", ("", *columns), [(part, *(row[name] for name in columns))])
    figures["rows"].append(row)


def _run(app: str, clients: int, config: dict[str, Any], way: str) -> dict[str, float]:
    new_state_folder()
    with tempfile.TemporaryDirectory(prefix="fgpu-trace-") as folder:
        figures = str(Path(folder, "figures.json"))
        app_config = {**config, "num-clients": clients, "figures": figures, "strategy": "ours"}
        if app == "digits":
            app_config["model"] = str(Path(folder, "model.npz"))
        arguments = json.dumps([str(_APPS / app), clients, app_config, folder, way])
        try:
            ran = subprocess.run(
                [sys.executable, "-c", _PROGRAM, arguments],
                env=environment(),
                capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        finally:
            end_servers()
        if ran.returncode:
            raise BenchmarkError(f"{app}, tracing {way}: status {ran.returncode}\n{ran.stderr[-4000:]}")
        traces = list(Path(folder).glob(f"*/{trace.FILE_NAME}"))
        lines = sum(1 for path in traces for _ in trace.read(path))
        if (way == "on") != (lines > 0):
            raise BenchmarkError(f"{app}, tracing {way}: {lines} lines in the trace")
        return {**json.loads(ran.stdout.splitlines()[-1]), "lines": lines}


def _line_us() -> float:
    """Return what it takes to write a line, in microseconds."""
    count = 2000
    fields = {"call": "0123456789ab", "client": "12", "task": "train", "round": 3, "pid": 12345}
    with tempfile.TemporaryDirectory(prefix="fgpu-trace-") as folder:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(count):
                trace.write_to(folder, "worker_started", **fields, start_method="forkserver", threads=1)
            took.append((time.perf_counter() - began) / count * 1e6)
    return median(took)


if __name__ == "__main__":
    sys.exit(main())
