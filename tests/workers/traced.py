"""The calls of a test, as its trace tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_gpu import trace

#: The start methods whose workers are processes of their own.
SUPERVISED = ("forkserver", "spawn", "fork")


@dataclass
class Run:
    """The calls of one test and what they may leave behind."""

    folder: Path
    temporary: Path

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in trace.read(self.folder / trace.FILE_NAME) if line["event"] == event]

    def pids(self) -> list[int]:
        return [line["pid"] for line in self.events("worker_started")]
