"""What tests of the launcher ask about its processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from live_processes import processes_with
from waiting import until

from flower_gpu import trace

COMMAND = ("-P", "-m", "flower_gpu.cli", "launch")
TINY_APP = Path(__file__).parent / "tiny_app"
TIMEOUT_S = 240

#: Plans command lines, or pairs of a line and further variables; what each remarks, or why it is refused.
PlanOn = Callable[..., list[tuple[list[str] | None, str | None]]]


@dataclass(frozen=True)
class LaunchRun:
    """A `flower-gpu launch` that was started."""

    log_dir: Path
    process: subprocess.Popen[str]

    @property
    def folder(self) -> Path:
        (folder,) = self.log_dir.iterdir()
        return folder

    def processes(self) -> list[int]:
        """Find the processes of the run."""
        return processes_of(self.log_dir)

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end; return the exit status, stdout, and stderr."""
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
    """Find the processes of runs whose folders are in a folder."""
    return list(processes_with("FLOWER_GPU_RUN_DIR", folder))


def read_pids(path: Path) -> list[int]:
    """Read the pids a service has written, once they are there."""
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} is written")
    return [int(word) for word in path.read_text().split()]
