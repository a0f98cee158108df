"""What a fork server keeps of its connections, and of a fork that is to take its place."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Session:
    """One connection: a call, or a process that says it may have more of them.

    Parameters
    ----------
    connection : socket
        To the caller.
    caller : int
        The process at its other end.
    record : dict
        What the caller wants; empty before it has said so.
    folder : int
        Descriptor of the caller's working directory, or -1.
    pid : int
        The worker, or -1.
    imported : int
        Memory file in which the worker tells what it had to import, or -1.
    stays : bool
        Whether this is no call, but a process that may have some.
    """

    connection: socket.socket
    caller: int
    record: dict[str, Any] = field(default_factory=dict)
    folder: int = -1
    pid: int = -1
    imported: int = -1
    stays: bool = False

    def close(self) -> None:
        """Let go of all descriptors."""
        self.connection.close()
        for descriptor in (self.folder, self.imported):
            if descriptor >= 0:
                os.close(descriptor)
        self.folder = self.imported = -1


@dataclass(frozen=True)
class Growth:
    """A fork that imports libraries: its process, where it tells how that went, what, and how long it may."""

    pid: int
    report: int
    names: list[str]
    deadline: float
