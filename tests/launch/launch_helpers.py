"""Helpers for the launcher's tests: a started launch, and its processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from live_processes import processes_with
from waiting import until

from flower_gpu import trace
from flower_gpu.cli import main as cli
from flower_gpu.cli.launch import from_arguments
from flower_gpu.launch.plan import Plan, make_plan

COMMAND = ("-P", "-m", "flower_gpu.cli", "launch")
TINY_APP = Path(__file__).parent / "tiny_app"
TIMEOUT_S = 240

#: Plans command lines, or pairs of a line and extra environment variables.
#: Returns a pair for each line: the remarks of its plan, and the reason if it is refused.
PlanOn = Callable[..., list[tuple[list[str] | None, str | None]]]


def plan_of(app: Path, *arguments: str) -> Plan:
    """Return the plan of a command line. Each of the arguments may hold several words."""
    words = [word for text in arguments for word in text.split()]
    return make_plan(from_arguments(cli.build_parser().parse_args(["launch", str(app), *words])))


@dataclass(frozen=True)
class LaunchRun:
    """A `flower-gpu launch` process that was started."""

    log_dir: Path
    process: subprocess.Popen[str]

    @property
    def folder(self) -> Path:
        (folder,) = self.log_dir.iterdir()
        return folder

    def processes(self) -> list[int]:
        """Return the pids of the run's processes."""
        return processes_of(self.log_dir)

    def finish(self) -> tuple[int, str, str]:
        """Wait until the process exits, and return its exit status, stdout and stderr."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def wait_for_a_worker(self) -> None:
        """Wait until a client trains."""
        traces = f"*/{trace.FILE_NAME}"
        until(
            lambda: any("worker_started" in file.read_text() for file in self.log_dir.glob(traces)),
            "a client trains",
            TIMEOUT_S,
        )


def processes_of(folder: Path) -> list[int]:
    """Return the pids of the processes of all runs with their run folders in `folder`."""
    return list(processes_with("FLOWER_GPU_RUN_DIR", folder))


def read_pids(path: Path) -> list[int]:
    """Wait until a service has written its pids to a file, and return them."""
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} is written")
    return [int(word) for word in path.read_text().split()]
