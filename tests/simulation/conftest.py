"""Fixtures of several files: a host with one stub GPU, grids in this process, and handlers with workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grid_handlers import RUN_ID, GridUnderTest
from recycled_handler import Handler, handlers
from stub_host import StubHost

from flower_gpu.simulation.run import _identity


@pytest.fixture
def one_gpu(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path, gpus=1)


@pytest.fixture
def identity() -> Iterator[None]:
    """Flower lets only the SuperLink's side of a run create messages."""
    with _identity(RUN_ID):
        yield


@pytest.fixture
def new_grid(identity: None) -> Iterator[Callable[..., GridUnderTest]]:
    harnesses: list[GridUnderTest] = []

    def new(threads: int = 2, *arguments: Any, **options: Any) -> GridUnderTest:
        harnesses.append(GridUnderTest(threads, *arguments, **options))
        return harnesses[-1]

    yield new
    for harness in harnesses:
        harness.close()


@pytest.fixture
def new_handler() -> Iterator[Callable[..., Handler]]:
    with handlers() as new:
        yield new
