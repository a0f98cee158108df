"""Ranks under the GPU guard find each other, and none of them can open a device outside of the lease."""

from __future__ import annotations

import pytest

from flower_gpu import GPUClient, run_in_worker
from flower_gpu.calls.grants import guard

pytestmark = [
    pytest.mark.skipif(guard.problem() is not None, reason=str(guard.problem())),
]


def test_ranks_learn_and_cannot_open_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_GUARDED", "/dev/full")
    weights = run_in_worker("ranks_tasks:first_weights")
    client = GPUClient("ranks_tasks:guarded", num_gpus=2)
    _, num_examples, metrics = client.fit(weights, {"device": "/dev/full"})
    assert num_examples == 2  # one per rank
    assert metrics == {"refused": 2.0}
