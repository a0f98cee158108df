"""Runs `flower-gpu launch` on a whole app as a user does, and checks that no process is left behind.

Also has helpers to read the traces of such runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from shared_servers import SHARED_STATE

from flower_gpu import trace
from flower_gpu.watch.folds.worker_span import WorkerSpan
from flower_gpu.watch.history import History

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
COMMAND = (sys.executable, "-m", "flower_gpu.cli", "launch")
SIMULATE = (*COMMAND[:-1], "simulate")


def events_of(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return the events of a trace with these names, in their order."""
    path = folder / trace.FILE_NAME
    return [event for event in trace.read(path) if event["event"] in names] if path.exists() else []


def most_at_a_time(events: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of workers that ran at the same time.

    Each worker starts after its lease was granted, and ends before the lease is released.
    """
    running = largest = 0
    for event in events:
        running += 1 if event["event"] == "worker_started" else -1
        largest = max(largest, running)
    return largest


@dataclass(frozen=True)
class Launched:
    """A launch that has ended."""

    code: int
    output: str
    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return loaded

    @property
    def workers(self) -> list[WorkerSpan]:
        """Spans of all calls that ran in a worker."""
        return self.history.calls.workers

    @property
    def history(self) -> History:
        return History.read(self.folder / trace.FILE_NAME)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        return events_of(self.folder, *names)

    def leased(self) -> dict[str, set[int]]:
        """Return the indices of the GPUs that each client leased according to the trace."""
        indices: dict[str, set[int]] = {}
        for event in self.events("lease_granted"):
            indices.setdefault(event["client"], set()).update(gpu["index"] for gpu in event["gpus"])
        return indices

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in self.folder.glob("*.log"))


Launch = Callable[..., Launched]


def launcher(folder: Path) -> Launch:
    """Return a function that launches an app, waits for its end, and keeps its logs below `folder`.

    All runs share one home folder, because a fork server only serves programs with the same HOME.
    """
    runs, home = folder / "runs", Path(SHARED_STATE["FLOWER_GPU_STATE_DIR"], "home")
    home.mkdir(exist_ok=True)

    def run(
        app: Path,
        *options: str,
        timeout_s: float = 280,
        command: Sequence[str] = COMMAND,
        env: Mapping[str, str] | None = None,
    ) -> Launched:
        done = subprocess.run(
            [*command, str(app), *options, "--log-dir", str(runs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **SHARED_STATE, "HOME": str(home), **(env or {})},
        )
        assert not (home / ".flwr").exists(), "the user's own Flower configuration is not touched"
        (log_dir,) = runs.iterdir()
        assert_nothing_left(log_dir)
        return Launched(done.returncode, done.stdout, log_dir)

    return run


def assert_nothing_left(folder: Path) -> None:
    """Check that soon no process has the run's folder in its environment or command line.

    Flower's processes check only from time to time whether their parent has exited, and later on a busy
    machine. A fork server that the run started stays for other programs, but its workers must be gone.
    """
    deadline = time.monotonic() + 60
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left


def _processes_of(folder: Path) -> dict[int, str]:
    commands, parents = {}, {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if str(folder) in command or any(str(folder) in value for value in process.environ().values()):
                commands[process.pid], parents[process.pid] = command, process.ppid()
    servers = {pid for pid, command in commands.items() if "flower_gpu.workers.forkserver" in command}
    staying = {pid for pid in servers if parents[pid] not in servers}
    return {pid: command for pid, command in commands.items() if pid not in staying | {os.getpid()}}
