"""Footprints of calls that train with PyTorch, from the figures of the worker to the next call's lease.

The allocator is simulated by its figures; all the rest is real but the GPU.
"""

from __future__ import annotations

import pytest
from calls_host import GIB, CallsHost

from flower_gpu.leases.footprint_rule import needed_bytes

pytestmark = pytest.mark.timeout(120)

CONTEXT = 0.5
OPTIONS = {"start_method": "forkserver"}


def lease_for(gib: float) -> float:
    """Return the lease of a call with this footprint in GiB."""
    return round(needed_bytes(int(gib * GIB)) / GIB, 2)


def test_a_footprint_is_what_tensors_had_and_not_what_the_allocator_kept(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    for _ in range(2):
        caller.follow(["train", 4.0, 1.3], **OPTIONS)
    assert calls_host.granted() == [0.0, lease_for(CONTEXT + 4.0 * 1.125 + 40 / 1024)]
    [told, _] = [one["gpus"][0] for one in calls_host.trace("worker_finished")]
    assert (told["allocated_peak_bytes"], told["reserved_peak_bytes"]) == (4 * GIB, int(5.2 * GIB))
    assert told["context_bytes"] == told["outside_bytes"] == GIB // 2


def test_a_task_in_pieces_runs_out_once(calls_host: CallsHost) -> None:
    """It needs twice what its tensors have, and nobody could know."""
    caller = calls_host.start()
    caller.follow(["train", 2.0, 1.1], **OPTIONS)
    for _ in range(3):
        caller.follow(["train", 2.0, 3.0, 2.0], **OPTIONS)
    assert len(calls_host.trace("out_of_memory")) == 1
    [told] = calls_host.trace("out_of_memory")
    assert told["kind"] == "over_cap" and told["allocated_bytes"] < 2 * GIB
    first, second, again, *later = calls_host.granted()
    assert first == 0.0 and second < 4 < again
    assert all(CONTEXT + 4.0 < size < again for size in later)


def test_another_library_beside_pytorch_counts_for_its_task_only(calls_host: CallsHost) -> None:
    """It was taken for the size of every context on this model of GPU, until somebody cleared it by hand."""
    caller = calls_host.start()
    steps = ["train", 2.0, 1.1, 1.0, 4.0]
    [cap] = caller.follow(steps, name="a", **OPTIONS)["answers"]
    assert cap > 15
    [cap] = caller.follow(steps, name="a", **OPTIONS)["answers"]
    assert calls_host.granted()[1] == lease_for(CONTEXT + 4.0 + 2.2)
    assert cap == round(
        calls_host.granted()[1] - CONTEXT - 4.0, 2
    )  # or the two would take more than the lease
    [cap] = caller.follow(["train", 1.0, 1.1], gpu_memory="4GiB", **OPTIONS)["answers"]
    assert cap == 4.0 - CONTEXT
