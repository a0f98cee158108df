"""What a client of an MPS daemon does in the folder of its pipes, and what none may do."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path


def uses(folder: str) -> dict[str, str]:
    """Try each; return "done", or the error."""
    path = Path(folder)
    tries: dict[str, Callable[[], object]] = {
        "connect": lambda: _connect(path / "control"),
        "list": lambda: list(path.iterdir()),
        "read and write": lambda: os.close(os.open(path / "log", os.O_RDWR)),
        "make": (path / "new").touch,
        "remove": (path / "log").unlink,
        "replace": lambda: (path / "log").rename(path / "control"),
        "empty": lambda: os.truncate(path / "log", 0),
    }
    return {name: _tried(attempt) for name, attempt in tries.items()}


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def _tried(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"
