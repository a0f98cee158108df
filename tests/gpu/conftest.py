"""Stub hosts, and processes that look at their GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from nvml_stub import Host

TESTS = Path(__file__).parents[1]
TAKER = Path(__file__).with_name("taker.py")


class Taker:
    """A process on a host, which answers questions about the GPUs it sees."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TAKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}", **env},
        )

    def __call__(self, command: str = "take") -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        if "error" in reply:
            raise AssertionError(reply["error"])
        return reply["answer"]

    def __enter__(self) -> Taker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Two GPUs of 16 GiB."""
    return Host(tmp_path / "host")


@pytest.fixture
def taker() -> Iterator[Callable[[dict[str, str]], Taker]]:
    """Start a process with these variables that looks at the GPUs when asked."""
    started: list[Taker] = []

    def start(env: dict[str, str]) -> Taker:
        started.append(Taker(env))
        return started[-1]

    yield start
    for one in started:
        one.__exit__(None, None, None)
