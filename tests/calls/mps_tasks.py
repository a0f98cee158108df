"""Actions in the pipe folder of an MPS daemon: those that its clients need, and those that are forbidden."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path


def try_actions(folder: str) -> dict[str, str]:
    """Try each action. Return "done" or the name of its error for each."""
    path = Path(folder)
    actions: dict[str, Callable[[], object]] = {
        "connect": lambda: _connect(path / "control"),
        "list": lambda: list(path.iterdir()),
        "read and write": lambda: os.close(os.open(path / "log", os.O_RDWR)),
        "make": (path / "new").touch,
        "remove": (path / "log").unlink,
        "replace": lambda: (path / "log").rename(path / "control"),
        "empty": lambda: os.truncate(path / "log", 0),
    }
    return {name: _outcome(action) for name, action in actions.items()}


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def _outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"
