"""A task that gets stuck on a disk that hangs."""

from __future__ import annotations

import os
from pathlib import Path


def look_at(folder: str, pid_file: str) -> None:
    """Write down which process this is, and look for a file."""
    Path(pid_file).write_text(str(os.getpid()))
    Path(folder, "file").stat()
