"""What tests ask about processes of this host."""

from __future__ import annotations

import os
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
