"""Fixtures of the tests of ``gpu_mod``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flwr.supercore.task_identity import TaskIdentity

_IDENTITY = {"_task_id": 11, "_run_id": 12, "_node_id": 13}


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process the identity of a task, because Flower creates no message without it."""
    for name, value in _IDENTITY.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    # Settings of the user who runs the tests must not influence them.
    for name in ("FLOWER_GPU_CLIENT", "FLOWER_GPU_START_METHOD", "FLOWER_GPU_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    yield
