"""Runs of an app by ``flower-gpu simulate``, by Flower's Simulation Runtime with Ray, and by a plain loop."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared import driver
from benchmarks.shared.memory import Sampler
from benchmarks.shared.processes import (
    ROOT,
    BenchmarkError,
    cpu_s,
    descendants,
    end_servers,
    new_state_folder,
    ray_environment,
)
from flower_gpu import trace

ENGINES = ("ours", "ray", "loop")
TIMEOUT_S = 1800.0

_APPS = Path(__file__).parent / "apps"
_PROGRAMS = Path(__file__).parent / "programs"
_STRATEGIES = {"ours": "ours", "ray": "flower"}
_END_S = 20.0  # what others leave may end by itself before the next run


@dataclass(frozen=True)
class Run:
    """What is to run.

    Parameters
    ----------
    engine : str
        One of :data:`ENGINES`.
    app : str
        A folder in ``apps``.
    clients : int
        How many virtual clients there are.
    config : mapping
        The app's run config.
    saves_model : bool
        Whether the app leaves its model.
    options : sequence of str
        More options of ``flower-gpu simulate``.
    num_gpus : float
        Ray: the share of a GPU that a client has.
    is_second : bool
        Ours: whether it finds the fork server of a run before it.
    env : mapping
        Ours: more environment variables.
    """

    engine: str
    app: str
    clients: int
    config: Mapping[str, Any]
    saves_model: bool = False
    options: Sequence[str] = ()
    num_gpus: float = 0.0
    is_second: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """What a run gave.

    Attributes
    ----------
    total_s : float
        From the start of the command to its end.
    total_cpu_s : float
        What the CPUs took for that, in all processes of the run.
    memory : Sampler, optional
        Of all processes of the run, if it was watched. That takes time from runs of many small processes.
    figures : dict
        What the app has written down: ``rounds_s``, one for each round.
    model : list of arrays
        The final one, if the app leaves it.
    summary : dict
        Ours: ``result.json``.
    replied : list of float
        Ours: when each worker finished, as ``time.time()`` gives it.
    cpu_s : list of float
        Ours: what the CPUs took for the app's own tasks, for each round.
    calls_s : dict of int to list of float
        Ours: what each call of a round took, with the start of its worker.
    calls : list of dict
        Ours: what the trace tells of each call at its end.
    """

    total_s: float
    total_cpu_s: float
    memory: Sampler | None
    figures: dict[str, Any]
    model: list[NDArray[Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    replied: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    calls_s: dict[int, list[float]] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def peak_mb(self) -> float | None:
        """The most memory that the tree was seen to take; None if nobody looked."""
        return None if self.memory is None else round(self.memory.peak_mb, 1)

    @property
    def round_s(self) -> float:
        """Seconds of a round without what engines start in the first; with it, if there is only that one."""
        rounds_s: list[float] = self.figures["rounds_s"]
        return median(rounds_s[1:] or rounds_s)


def available(asked: Sequence[str]) -> list[str]:
    """Return the engines that can run here, and say which cannot."""
    if "ray" in asked and importlib.util.find_spec("ray") is None:
        print("Ray is not installed and left out: pip install 'flwr[simulation]'", file=sys.stderr)
        return [engine for engine in asked if engine != "ray"]
    return list(asked)


def in_turn(ways: Mapping[str, Run], runs: int) -> dict[str, list[Done]]:
    """Run all ways one after the other, every other time from the last to the first.

    Their memory is looked at in one run more, the last of each; where there is one run only, in that run.
    """
    done: dict[str, list[Done]] = {name: [] for name in ways}
    for _, name in driver.in_turn(ways, runs):
        done[name].append(perform(ways[name], is_watched=runs == 1))
    for name in ways if runs > 1 else ():
        done[name][-1] = replace(done[name][-1], memory=perform(ways[name]).memory)
    return done


def perform(run: Run, *, is_watched: bool = True, timeout_s: float = TIMEOUT_S) -> Done:
    """Run an app once, with nothing left of the runs before.

    Parameters
    ----------
    run : Run
        What to run.
    is_watched : bool
        Whether its memory is looked at meanwhile.
    timeout_s : float
        How long the command may take.

    Raises
    ------
    BenchmarkError
        If the command fails, or takes too long; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="fgpu-sim-") as name:
        folder = Path(name)
        config = {
            **({"strategy": _STRATEGIES[run.engine]} if run.engine in _STRATEGIES else {}),
            **run.config,
            "num-clients": run.clients,
            "figures": str(folder / "figures.json"),
            **({"model": str(folder / "model.npz")} if run.saves_model else {}),
        }
        command, env = _COMMANDS[run.engine](run, config, folder)
        try:
            if run.is_second:
                _timed(command, env, folder, False, timeout_s)
                shutil.rmtree(folder / "runs")
            before_s = cpu_s()
            total_s, memory, status = _timed(command, env, folder, is_watched, timeout_s)
            total_cpu_s = cpu_s() - before_s
        finally:
            _end_what_is_left()
        log = (folder / "log").read_text(errors="replace")
        figures = folder / "figures.json"
        if status or not figures.exists():
            raise BenchmarkError(f"{run.app}, {run.engine}: ended with status {status}\n{log[-4000:]}")
        return Done(
            total_s,
            total_cpu_s,
            memory,
            json.loads(figures.read_text()),
            _model(folder / "model.npz") if run.saves_model else [],
            *(_results(folder) if run.engine == "ours" else ()),
        )


def _timed(
    command: Sequence[str], env: Mapping[str, str], folder: Path, is_watched: bool, timeout_s: float
) -> tuple[float, Sampler | None, int]:
    watching = Sampler() if is_watched else nullcontext()
    with (folder / "log").open("wb") as log, watching as memory:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            said = (folder / "log").read_text(errors="replace")[-4000:]
            raise BenchmarkError(f"{' '.join(command)}: not done within {timeout_s:g} s\n{said}") from None
        return time.perf_counter() - began, memory, status


def _ours(run: Run, config: Mapping[str, Any], folder: Path) -> tuple[list[str], dict[str, str]]:
    new_state_folder()  # so that the start of the fork server counts
    pairs = [f"{key}={json.dumps(value)}" for key, value in config.items() if key != "num-clients"]
    command = [sys.executable, "-m", "flower_gpu.cli", "simulate", str(_APPS / run.app)]
    command += ["--num-supernodes", str(run.clients), "--run-config", " ".join(pairs)]
    command += ["--log-dir", str(folder / "runs"), "--seed", "0", *run.options]
    return command, {**environment(), **run.env}


def _ray(run: Run, config: Mapping[str, Any], folder: Path) -> tuple[list[str], dict[str, str]]:
    cores = len(os.sched_getaffinity(0))
    arguments = [str(_APPS / run.app), run.clients, cores, run.num_gpus, json.dumps(config)]
    command = [sys.executable, str(_PROGRAMS / "in_ray.py"), *map(str, arguments)]
    env = {name: value for name, value in environment().items() if not name.startswith("FLOWER_GPU_")}
    env |= ray_environment(folder)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_APPS / run.app), env.get("PYTHONPATH")]))
    return command, env


def _loop(run: Run, config: Mapping[str, Any], folder: Path) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, str(_PROGRAMS / "loop.py"), str(_APPS / run.app), json.dumps(config)]
    return command, {**environment(), "OMP_NUM_THREADS": "1"}  # of one core: it is divided by their number


_COMMANDS: dict[
    str, Callable[[Run, Mapping[str, Any], Path], tuple[list[str], dict[str, str]]]
] = {"ours": _ours, "ray": _ray, "loop": _loop}  # fmt: skip


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for rounds.py
    usual = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**os.environ, **usual, "PYTHONPATH": path}


def _end_what_is_left() -> None:
    """Wait for what ends by itself, as Ray's processes do, then end fork servers, which stay."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and any(_is_of_ray(pid) for pid in descendants(os.getpid())):
        time.sleep(0.1)
    end_servers()


def _is_of_ray(pid: int) -> bool:
    try:
        return b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _model(path: Path) -> list[NDArray[Any]]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


def _results(
    folder: Path,
) -> tuple[dict[str, Any], list[float], list[float], dict[int, list[float]], list[dict[str, Any]]]:
    (results,) = (folder / "runs").iterdir()
    told = list(trace.read(results / trace.FILE_NAME))
    sleeps_at = {event["call"]: event["time"] for event in told if event.get("desc") == "slow-down"}
    events = [
        {**event, "sleeps_at": sleeps_at.get(event["call"])}
        for event in told
        if event["event"] == "worker_finished"
    ]
    # Of a message that was compared one copy counts: the others are not the app's own work.
    cpu_s = {(event["round"], event["task"], event["client"]): event["cpu_s"] or 0.0 for event in events}
    rounds = sorted({server_round for server_round, _, _ in cpu_s if server_round is not None})
    of_rounds = [sum(value for key, value in cpu_s.items() if key[0] == one) for one in rounds]
    calls_s: dict[int, list[float]] = {}
    for event in events:
        calls_s.setdefault(event["round"], []).append(event["seconds"])
    replied = [event["time"] for event in events]
    return json.loads((results / "result.json").read_text()), replied, of_rounds, calls_s, events
