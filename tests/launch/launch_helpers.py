"""What tests of the launcher ask about its processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from live_processes import processes_with
from waiting import until

COMMAND = (sys.executable, "-P", "-m", "flower_gpu.cli", "launch")

#: Plans command lines, or pairs of a line and further variables; what each remarks, or why it is refused.
PlanOn = Callable[..., list[tuple[list[str] | None, str | None]]]


def processes_of(folder: Path) -> list[int]:
    """Find the processes of runs whose folders are in a folder."""
    return list(processes_with("FLOWER_GPU_RUN_DIR", folder))


def read_pids(path: Path) -> list[int]:
    """Read the pids a service has written, once they are there."""
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} is written")
    return [int(word) for word in path.read_text().split()]
