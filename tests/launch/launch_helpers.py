"""What tests ask about processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition; the limit is far above what it takes, it only ends a test that hangs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s still not: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def processes_of(folder: Path) -> list[int]:
    """Find the processes whose environment names a run folder below a folder."""
    prefix = b"FLOWER_GPU_RUN_DIR=" + os.fsencode(folder)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(variable.startswith(prefix) for variable in variables):
                found.append(int(entry.name))
    return found


def read_pids(path: Path) -> list[int]:
    """Read the pids a service has written, once they are there."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} is written")
    return [int(word) for word in path.read_text().split()]
