"""A task that gets stuck on a disk that hangs."""

from __future__ import annotations

import os
from pathlib import Path


def look_at(folder: str, pid_file: str) -> None:
    """Write this process's pid to a file, and look for a file in the folder."""
    Path(pid_file).write_text(str(os.getpid()))
    Path(folder, "file").stat()
