"""Runs a command with more than 1,024 open files, which is the limit of `select.select`."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

#: Prefix for a command.
WITH_MANY_FILES = (sys.executable, str(Path(__file__)))
MANY = 1100


def open_many() -> None:
    """Open enough files to make the next descriptor too large for `select.select`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if hard < 0 else min(4096, hard), hard))
    for _ in range(MANY):
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)


if __name__ == "__main__":
    open_many()
    os.execvp(sys.argv[1], sys.argv[1:])
