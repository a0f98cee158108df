"""Runs of the app by ``flower-gpu simulate``, by Flower's Simulation Runtime with Ray, and by a loop."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import driver, processes
from benchmarks.shared.app import APP, config_pairs, copy_app
from benchmarks.shared.memory import Sampler
from benchmarks.shared.processes import BenchmarkError, flower_environment
from flower_gpu import trace

ENGINES = ("ours", "ray", "loop")
TIMEOUT_S = 1800.0

_STRATEGIES = {"ours": "ours", "ray": "flower"}
#: Time in which processes may exit by themselves before the next run.
_EXIT_S = 20.0


@dataclass(frozen=True)
class Run:
    """A run of the app.

    Parameters
    ----------
    engine : str
        One of :data:`ENGINES`.
    client : str
        A module of ``bench_app``.
    clients : int
        Number of virtual clients.
    config : mapping
        Part of the run config that differs from the app's defaults.
    saves_model : bool
        Whether the final model is needed.
    options : sequence of str
        Additional options of ``flower-gpu simulate``.
    num_gpus : float
        Ray: share of a GPU per client.
    is_second : bool
        Ours: whether the run uses the fork server of an earlier run.
    env : mapping
        Ours: additional environment variables.
    """

    engine: str
    client: str
    clients: int
    config: Mapping[str, Any]
    saves_model: bool = False
    options: Sequence[str] = ()
    num_gpus: float = 0.0
    is_second: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def run_config(self, folder: Path) -> dict[str, Any]:
        """Return the run config, with files in a folder."""
        strategy = {"strategy": _STRATEGIES[self.engine]} if self.engine in _STRATEGIES else {}
        model = {"model": str(folder / "model.npz")} if self.saves_model else {}
        return {**strategy, **self.config, **model, "figures": str(folder / "figures.json")}


@dataclass(frozen=True)
class Result:
    """Figures of a run.

    Attributes
    ----------
    total_s : float
        Seconds from the start of the command to its exit.
    total_cpu_s : float
        CPU seconds of all processes of the run.
    peak_mb : float, optional
        Highest memory of all processes of the run together, if it was sampled.
    figures : dict
        Figures of the app: ``rounds_s`` has the seconds of each round.
    model : list of arrays
        The final model, if the run saves it.
    summary : dict
        Ours: ``result.json``.
    calls : list of dict
        Ours: the ``worker_finished`` event of each call, from the trace.
    """

    total_s: float
    total_cpu_s: float
    peak_mb: float | None
    figures: dict[str, Any]
    model: list[Any] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def round_s(self) -> float:
        """Median of the rounds after the first, in which engines start. With one round, that round."""
        rounds_s: list[float] = self.figures["rounds_s"]
        return median(rounds_s[1:] or rounds_s)

    def task_cpu_s(self) -> list[float]:
        """Return the CPU seconds of the app's own tasks in each round."""
        # Several copies of a message may run. One of them counts as the app's own work.
        by_message = {
            (call["round"], call["task"], call["client"]): call["cpu_s"] or 0.0 for call in self.calls
        }
        rounds = sorted({number for number, _, _ in by_message if number is not None})
        return [sum(value for key, value in by_message.items() if key[0] == number) for number in rounds]

    def call_seconds(self, server_round: int) -> list[float]:
        """Return the seconds of each call of a round, with the start of its worker."""
        return [call["seconds"] for call in self.calls if call["round"] == server_round]


def available(engines: Sequence[str]) -> list[str]:
    """Return the installed engines, and print the others."""
    if "ray" in engines and importlib.util.find_spec("ray") is None:
        print("Ray is not installed and left out: pip install 'flwr[simulation]'", file=sys.stderr)
        return [engine for engine in engines if engine != "ray"]
    return list(engines)


def in_turn(runs: Mapping[str, Run], count: int) -> dict[str, list[Result]]:
    """Perform all runs in alternation, in reverse order every other time.

    Sampling memory takes time. So it is done in one additional run of each, unless ``count`` is 1.
    """
    results: dict[str, list[Result]] = {name: [] for name in runs}
    for _, name in driver.in_turn(runs, count):
        results[name].append(perform(runs[name], is_sampled=count == 1))
    for name in runs if count > 1 else ():
        results[name][-1] = replace(results[name][-1], peak_mb=perform(runs[name]).peak_mb)
    return results


def perform(run: Run, *, is_sampled: bool = True, timeout_s: float = TIMEOUT_S) -> Result:
    """Perform a run once, with a new fork server, or a new Ray.

    Parameters
    ----------
    run : Run
        The run.
    is_sampled : bool
        Whether its memory is sampled.
    timeout_s : float
        Seconds until the command is killed.

    Raises
    ------
    BenchmarkError
        If the command fails or is killed; with the last lines of its output.
    """
    with tempfile.TemporaryDirectory(prefix="fgpu-sim-") as name:
        folder = Path(name)
        processes.new_state_folder()
        command, env = _COMMANDS[run.engine](run, folder)
        try:
            if run.is_second:
                _timed(command, env, folder, False, timeout_s)
                shutil.rmtree(folder / "runs")
            before_s = processes.cpu_s()
            total_s, peak_mb, status = _timed(command, env, folder, is_sampled, timeout_s)
            total_cpu_s = processes.cpu_s() - before_s
        finally:
            _end_leftovers()
        figures = folder / "figures.json"
        if status or not figures.exists():
            log = (folder / "log").read_text(errors="replace")[-4000:]
            raise BenchmarkError(f"{run.client}, {run.engine}: exited with status {status}\n{log}")
        result = Result(total_s, total_cpu_s, peak_mb, json.loads(figures.read_text()))
        if run.saves_model:
            result = replace(result, model=read_model(folder / "model.npz"))
        return _with_trace(result, folder) if run.engine == "ours" else result


def _timed(
    command: Sequence[str], env: Mapping[str, str], folder: Path, is_sampled: bool, timeout_s: float
) -> tuple[float, float | None, int]:
    """Return seconds, peak memory and exit status of a command."""
    sampling = Sampler() if is_sampled else nullcontext()
    with (folder / "log").open("wb") as log, sampling as sampler:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            output = (folder / "log").read_text(errors="replace")[-4000:]
            raise BenchmarkError(f"{' '.join(command)}: killed after {timeout_s:g} s\n{output}") from None
        seconds = time.perf_counter() - began
    return seconds, None if sampler is None else round(sampler.peak_mb, 1), status


def _ours(run: Run, folder: Path) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "flower_gpu.cli", "simulate", str(copy_app(run.client, folder))]
    command += ["--num-supernodes", str(run.clients), "--run-config", config_pairs(run.run_config(folder))]
    command += ["--log-dir", str(folder / "runs"), "--seed", "0", *run.options]
    return command, {**flower_environment(), **run.env}


def _ray(run: Run, folder: Path) -> tuple[list[str], dict[str, str]]:
    cores = len(os.sched_getaffinity(0))
    command, env = _script("in_ray.py", run, folder, str(cores), str(run.num_gpus))
    env = {name: value for name, value in env.items() if not name.startswith("FLOWER_GPU_")}
    return command, {**env, **processes.ray_environment(folder)}


def _loop(run: Run, folder: Path) -> tuple[list[str], dict[str, str]]:
    command, env = _script("in_loop.py", run, folder)
    # One thread, because the benchmark divides the loop's time by the number of cores.
    return command, {**env, "OMP_NUM_THREADS": "1"}


def _script(name: str, run: Run, folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    defaults = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config = {**defaults, **run.run_config(folder), "client": run.client, "num-clients": run.clients}
    env = flower_environment()
    env["PYTHONPATH"] = f"{APP}{os.pathsep}{env['PYTHONPATH']}"
    return [sys.executable, str(Path(__file__).with_name(name)), json.dumps(config), *arguments], env


_COMMANDS = {"ours": _ours, "ray": _ray, "loop": _loop}


def _end_leftovers() -> None:
    """Wait for Ray's processes, which exit by themselves, then kill fork servers, which stay."""
    deadline = time.monotonic() + _EXIT_S
    while time.monotonic() < deadline and any(map(_is_of_ray, processes.descendants(os.getpid()))):
        time.sleep(0.1)
    processes.end_servers()


def _is_of_ray(pid: int) -> bool:
    try:
        return b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def read_model(path: Path) -> list[Any]:
    """Return the arrays of a model that the app has saved."""
    with np.load(path) as file:
        return [file[name] for name in file.files]


def max_difference(model: Sequence[Any], other: Sequence[Any]) -> float:
    """Return the largest absolute difference of a weight."""
    return max(float(np.abs(mine - its).max()) for mine, its in zip(model, other, strict=True))


def _with_trace(result: Result, folder: Path) -> Result:
    """Add the summary and the calls of a run by ``flower-gpu simulate``."""
    (results,) = (folder / "runs").iterdir()
    events = list(trace.read(results / trace.FILE_NAME))
    sleeps_at = {event["call"]: event["time"] for event in events if event.get("desc") == "slow-down"}
    calls = [
        {**event, "sleeps_at": sleeps_at.get(event["call"])}
        for event in events
        if event["event"] == "worker_finished"
    ]
    return replace(result, summary=json.loads((results / "result.json").read_text()), calls=calls)
