"""Fixtures for stub hosts, and for processes that take an inventory of their GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from nvml_stub import Host


class Taker(Forked):
    """A process on a host that answers commands about its GPUs (see ``taker.py``)."""

    def __init__(self, env: dict[str, str]) -> None:
        super().__init__(Path(__file__).with_name("taker.py"), env)

    def __call__(self, command: str = "take") -> Any:
        self.write(command)
        reply = json.loads(self.read())
        if "error" in reply:
            raise AssertionError(reply["error"])
        return reply["answer"]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with two GPUs of 16 GiB."""
    return Host(tmp_path / "host")


@pytest.fixture
def take(host: Host, taker: Callable[[dict[str, str]], Taker]) -> Taker:
    """A process on the host with two GPUs."""
    return taker(host.env)


@pytest.fixture
def taker() -> Iterator[Callable[[dict[str, str]], Taker]]:
    """Return a function that starts a process with the given environment variables."""
    started: list[Taker] = []

    def start(env: dict[str, str]) -> Taker:
        started.append(Taker(env))
        return started[-1]

    yield start
    for process in started:
        process.close()
