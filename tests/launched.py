"""Runs `flower-gpu launch` on a whole app as a user does, and checks that nothing of it is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
COMMAND = (sys.executable, "-m", "flower_gpu.cli", "launch")


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

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in self.folder.glob("*.log"))


Launch = Callable[..., Launched]


def launcher(folder: Path) -> Launch:
    """Return what launches an app and waits for its end, with a folder as its home and for its logs."""
    runs = folder / "runs"

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
            env={**os.environ, "HOME": str(folder), **(env or {})},
        )
        (log_dir,) = runs.iterdir()
        assert_nothing_left(log_dir)
        return Launched(done.returncode, done.stdout, log_dir)

    return run


def assert_nothing_left(folder: Path) -> None:
    """No process mentions the run's folder in its environment or command line any more, or soon will not.

    Flower's own processes look once in a while whether their parent has ended; on a busy machine, later.
    """
    deadline = time.monotonic() + 60
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left


def _processes_of(folder: Path) -> dict[str, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(process.name) != os.getpid():
            found[process.name] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found
