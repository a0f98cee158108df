"""Part ``example``: an app by each command, and by SuperNodes that confine it.

It is examples/quickstart; with ``--model elementwise`` a small app that needs neither cuBLAS nor cuDNN. Each
way must end well, and have used the GPU.
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
from benchmarks.shared.processes import ROOT, BenchmarkError
from benchmarks.supernode.federation import environment, federation
from flower_gpu import trace
from flower_gpu.options import RUN_DIR_VARIABLE

LIMIT_S = 300.0

_APPS = {
    "resnet18": ROOT / "examples" / "quickstart",
    "elementwise": ROOT / "benchmarks" / "gpu" / "apps" / "elementwise",
}
_CLIENTS = 2
_MOST = 12_000  # characters of what a way has said that failed
_GPU = ("--gpu", "require")  # the CPU would do as well, but is not what is tried

Command = Callable[[Path, Mapping[str, str], Path, float], tuple[int, str]]


def simulate(app: Path, env: Mapping[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
    return _run(_flower_gpu("simulate", app, folder, "--num-supernodes"), env, timeout_s)


def launch(app: Path, env: Mapping[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
    return _run(_flower_gpu("launch", app, folder, "--clients"), env, timeout_s)


def supernodes(*options: str) -> Command:
    def run(app: Path, env: Mapping[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
        env = {**env, RUN_DIR_VARIABLE: str(folder)}
        try:
            with federation("ours", _CLIENTS, env, folder, (*_GPU, *options)):
                status, said = _run(["flwr", "run", str(app), "bench", "--stream"], env, timeout_s)
        except BenchmarkError as error:
            status, said = 1, str(error)
        if status:
            said += "".join(path.read_text(errors="replace") for path in sorted(folder.glob("**/*.log")))
        return status, said

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
    app = _APPS[setting.model]
    ways = _QUICK_WAYS if setting.sizes == QUICK else WAYS
    return {"app": app.name, "ways": [_tried(setting, way, app) for way in ways]}


def _tried(setting: Setting, way: str, app: Path) -> dict[str, Any]:
    folder = setting.folder / way.replace(" ", "")
    folder.mkdir()
    began = time.monotonic()
    status, said = WAYS[way](app, environment(str(folder)), folder, setting.deadline - began)
    seconds = time.monotonic() - began
    events = [event for path in folder.glob(f"**/{trace.FILE_NAME}") for event in trace.read(path)]
    finished = [event for event in events if event["event"] == "worker_finished"]
    told = [each for event in finished for each in event.get("gpus") or ()]
    return {
        "way": way,
        "status": status,
        "seconds": round(seconds, 2),
        "calls_on_a_gpu": len(told),
        "highest_mb": round(max((each["peak_bytes"] or 0 for each in told), default=0) / MB, 1),
        "said": said[-_MOST:] if status or not told else "",
    }


def _flower_gpu(command: str, app: Path, folder: Path, clients: str) -> list[str]:
    program = [sys.executable, "-m", "flower_gpu.cli", command, str(app), *_GPU]
    return [*program, clients, str(_CLIENTS), "--log-dir", str(folder)]


def _run(command: list[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(1.0, timeout_s),
            cwd=os.sep,
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"{(error.stdout or b'').decode(errors='replace')}\nit had no more time"
    return done.returncode, done.stdout


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError where a way has failed, or used no GPU."""
    failed = [row["way"] for row in result["ways"] if row["status"] or not row["calls_on_a_gpu"]]
    if failed:
        raise BenchmarkError(f"example: {', '.join(failed)} failed, or used no GPU; see what it said")


def show(result: dict[str, Any]) -> None:
    table.show(
        f"{result['app']}, {_CLIENTS} clients",
        ("way", "status", "seconds", "calls on a GPU", "highest MB"),
        [
            (
                row["way"],
                row["status"],
                f"{row['seconds']:.1f}",
                row["calls_on_a_gpu"],
                f"{row['highest_mb']:.0f}",
            )
            for row in result["ways"]
        ],
    )
    for row in result["ways"]:
        if row["said"]:
            print(f"\n{row['way']} said:\n{row['said']}", flush=True)
