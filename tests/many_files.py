"""Runs a command that has more than 1,024 open files, more than `select.select` can wait for."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

#: Goes before a command.
WITH_MANY_FILES = (sys.executable, str(Path(__file__)))
MANY = 1100


def open_many() -> None:
    """Open so many files that the number of the next one is too large for `select.select`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if hard < 0 else min(4096, hard), hard))
    for _ in range(MANY):
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)


if __name__ == "__main__":
    open_many()
    os.execvp(sys.argv[1], sys.argv[1:])
