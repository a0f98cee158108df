"""Part ``example``: an app by each command, and by SuperNodes with ``--confine``.

The app is examples/quickstart. With ``--model elementwise`` it is a client without cuBLAS and cuDNN. Each way
must succeed and use the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import MB, QUICK, Setting
from benchmarks.shared import table
from benchmarks.shared.app import config_pairs, copy_app
from benchmarks.shared.processes import ROOT, BenchmarkError
from benchmarks.supernode.federation import environment, federation
from flower_gpu import trace
from flower_gpu.options import RUN_DIR_VARIABLE

LIMIT_S = 300.0

_CLIENTS = 2
_MAX_OUTPUT = 12_000  # Characters.
#: Without this, the app would succeed on the CPU.
_GPU = ("--gpu", "require")

#: Takes the app and its run config, the environment, a folder, and a timeout.
Command = Callable[[list[str], Mapping[str, str], Path, float], tuple[int, str]]


def simulate(app: list[str], env: Mapping[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
    return _run(_flower_gpu("simulate", app, folder, "--num-supernodes"), env, timeout_s)


def launch(app: list[str], env: Mapping[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
    return _run(_flower_gpu("launch", app, folder, "--clients"), env, timeout_s)


def supernodes(*options: str) -> Command:
    def run(app: list[str], env: Mapping[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
        env = {**env, RUN_DIR_VARIABLE: str(folder)}
        try:
            with federation("ours", _CLIENTS, env, folder, (*_GPU, *options)):
                command = ["flwr", "run", app[0], "bench", "--stream", *app[1:]]
                status, output = _run(command, env, timeout_s)
        except BenchmarkError as error:
            status, output = 1, str(error)
        if status:
            output += "".join(path.read_text(errors="replace") for path in sorted(folder.glob("**/*.log")))
        return status, output

    return run


WAYS: dict[str, Command] = {
    "simulate": simulate,
    "launch": launch,
    "supernodes": supernodes(),
    "supernodes --confine": supernodes("--confine"),
    "supernodes --confine strict": supernodes("--confine", "strict"),
}
_QUICK_WAYS = ("supernodes --confine",)


def measure(setting: Setting) -> dict[str, Any]:
    app = [str(ROOT / "examples" / "quickstart")]
    if setting.model == "elementwise":
        # The server's files have to be outside of the folders that confined apps cannot see.
        figures = setting.folder / "figures.json"
        config = {"figures": str(figures), "num-clients": _CLIENTS, "model-mb": 0.004, "arrays": 1}
        app = [str(copy_app("elementwise", setting.folder)), "--run-config", config_pairs(config)]
    ways = _QUICK_WAYS if setting.sizes == QUICK else WAYS
    return {"app": Path(app[0]).name, "ways": [_measure(setting, way, app) for way in ways]}


def _measure(setting: Setting, way: str, app: list[str]) -> dict[str, Any]:
    folder = setting.folder / way.replace(" ", "")
    folder.mkdir()
    began = time.monotonic()
    status, output = WAYS[way](app, environment(str(folder)), folder, setting.deadline - began)
    seconds = time.monotonic() - began
    events = [event for path in folder.glob(f"**/{trace.FILE_NAME}") for event in trace.read(path)]
    finished = [event for event in events if event["event"] == "worker_finished"]
    reports = [report for event in finished for report in event.get("gpus") or ()]
    return {
        "way": way,
        "status": status,
        "seconds": round(seconds, 2),
        "calls_on_a_gpu": len(reports),
        "peak_mb": round(max((report["peak_bytes"] or 0 for report in reports), default=0) / MB, 1),
        "output": output[-_MAX_OUTPUT:] if status or not reports else "",
    }


def _flower_gpu(command: str, app: list[str], folder: Path, clients: str) -> list[str]:
    program = [sys.executable, "-m", "flower_gpu.cli", command, *app, *_GPU]
    return [*program, clients, str(_CLIENTS), "--log-dir", str(folder)]


def _run(command: list[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    try:
        process = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=max(1.0, timeout_s), cwd=os.sep,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return 1, f"{(error.stdout or b'').decode(errors='replace')}\nkilled after {timeout_s:.0f} s"
    return process.returncode, process.stdout


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError if a way has failed, or used no GPU."""
    failed = [row["way"] for row in result["ways"] if row["status"] or not row["calls_on_a_gpu"]]
    if failed:
        raise BenchmarkError(f"example: {', '.join(failed)} failed, or used no GPU; see the output above")


def show(result: dict[str, Any]) -> None:
    columns = "way status seconds calls_on_a_gpu peak_mb"
    table.show(f"{result['app']}, {_CLIENTS} clients", result["ways"], columns)
    for row in result["ways"]:
        if row["output"]:
            print(f"\noutput of {row['way']}:\n{row['output']}", flush=True)
