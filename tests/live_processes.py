"""Queries about the processes of this host."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil


def is_running(pid: int) -> bool:
    """Return True if a process is running. A zombie does not count."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def processes_with(name: str, folder: Path) -> dict[int, str]:
    """Return commands by pid of all processes with the variable `name` set to `folder` or a path in it."""
    commands = {}
    for process in psutil.process_iter():
        # The process may have exited, or belong to another account.
        with suppress(psutil.Error):
            value = process.environ().get(name, "")
            if value == str(folder) or value.startswith(f"{folder}{os.sep}"):
                commands[process.pid] = " ".join(process.cmdline()) + " "
    return commands
