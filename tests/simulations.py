"""Runs of `flower-gpu simulate` for tests, in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_app import variant
from shared_servers import SHARED_STATE

from flower_gpu import trace
from flower_gpu.watch.folds.rounds import RoundPart
from flower_gpu.watch.history import History

TIMEOUT_S = 120


@dataclass(frozen=True)
class Simulation:
    """A finished run."""

    status: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Finished calls of clients in the trace."""
        events = trace.read(self.folder / "trace.jsonl")
        return [e for e in events if e["event"] == "worker_finished" and e["client"] != "server"]

    def parts(self, task: str) -> list[RoundPart]:
        """Results of messages of a kind in the trace, for each round."""
        history = History.read(self.folder / "trace.jsonl")
        return [part for part in history.rounds.parts if part.task == task]


def command(app: str, nodes: int, *options: str) -> list[str]:
    simulate = [sys.executable, "-m", "flower_gpu.cli", "simulate"]
    return [*simulate, str(variant(app)), "--num-supernodes", str(nodes), *options]


def run(app: str, nodes: int, log_dir: Path, *options: str) -> Simulation:
    where = () if "--resume" in options else ("--log-dir", str(log_dir))
    done = subprocess.run(
        command(app, nodes, *where, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **SHARED_STATE},
    )
    folders = sorted(log_dir.iterdir()) if log_dir.is_dir() else []
    return Simulation(done.returncode, done.stdout, folders[-1] if folders else log_dir)


@contextmanager
def running(app: str, nodes: int, log_dir: Path | None, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run in a new process group. If it still runs at the end of the block, it is killed."""
    where = () if log_dir is None else ("--log-dir", str(log_dir))
    with subprocess.Popen(
        command(app, nodes, *where, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **SHARED_STATE},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """Read until a line starts with ``beginning``. Return all lines that were read."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"no line {beginning!r} in:\n{''.join(lines)}")
