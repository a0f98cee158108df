"""What tests ask about processes of this host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def is_running(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits for its parent does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def processes_with(name: str, folder: Path) -> dict[int, str]:
    """Return the processes started with a variable that names a folder, or one in it, and their commands."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another account's
            value = process.environ().get(name, "")
            if value == str(folder) or value.startswith(f"{folder}{os.sep}"):
                found[process.pid] = " ".join(process.cmdline()) + " "
    return found


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Wait for a condition; the limit is far above what it takes, it only ends a test that hangs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s still not: {what}"
        time.sleep(0.02)
