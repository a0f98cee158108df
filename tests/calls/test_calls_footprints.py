"""Footprints of calls that train with PyTorch, from a worker's measurement to the next call's lease.

The figures of the allocator and the GPU are simulated, and everything else is real.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from calls_host import GIB, CallsHost

from flower_gpu.leases.footprint_rule import Key, needed_bytes
from flower_gpu.workers.call import Call, task_key

CONTEXT = 0.5
OPTIONS = {"start_method": "forkserver"}


def lease_for(gib: float) -> float:
    """Return the lease of a call with this footprint in GiB."""
    return round(needed_bytes(int(gib * GIB)) / GIB, 2)


def test_a_footprint_counts_tensors_and_not_the_cache_of_the_allocator(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    for _ in range(2):
        caller.follow(["train", 4.0, 1.3], **OPTIONS)
    assert calls_host.granted() == [0.0, lease_for(CONTEXT + 4.0 * 1.125 + 40 / 1024)]
    [gpu, _] = [finished["gpus"][0] for finished in calls_host.trace("worker_finished")]
    assert (gpu["allocated_peak_bytes"], gpu["reserved_peak_bytes"]) == (4 * GIB, int(5.2 * GIB))
    assert gpu["context_bytes"] == gpu["outside_bytes"] == GIB // 2


def test_a_task_with_fragmented_memory_runs_out_of_memory_once(calls_host: CallsHost) -> None:
    """Its memory is fragmented, so it needs twice the size of its tensors, unlike earlier calls."""
    caller = calls_host.start()
    caller.follow(["train", 2.0, 1.1], **OPTIONS)
    for _ in range(3):
        caller.follow(["train", 2.0, 3.0, 2.0], **OPTIONS)
    assert len(calls_host.trace("out_of_memory")) == 1
    [event] = calls_host.trace("out_of_memory")
    assert event["kind"] == "over_cap" and event["allocated_bytes"] < 2 * GIB
    first, second, third, *later = calls_host.granted()
    assert first == 0.0 and second < 4 < third
    assert all(CONTEXT + 4.0 < size < third for size in later)


def test_memory_of_another_library_counts_for_its_task_only(calls_host: CallsHost) -> None:
    """Its memory once counted for all contexts on this GPU model until footprints were cleared by hand."""
    caller = calls_host.start()
    steps = ["train", 2.0, 1.1, 1.0, 4.0]
    [cap] = caller.follow(steps, name="a", **OPTIONS)["answers"]
    assert cap > 15
    [cap] = caller.follow(steps, name="a", **OPTIONS)["answers"]
    assert calls_host.granted()[1] == lease_for(CONTEXT + 4.0 + 2.2)
    # With a larger cap, PyTorch and the other library could exceed the lease together.
    assert cap == round(calls_host.granted()[1] - CONTEXT - 4.0, 2)
    [cap] = caller.follow(["train", 1.0, 1.1], gpu_memory="4GiB", **OPTIONS)["answers"]
    assert cap == 4.0 - CONTEXT


SCRIPT = """
import calls_tasks
import flower_gpu
import numpy

def train(gib):
    calls_tasks.follow([["train", gib, 1.0]])

def fit(weights, config):
    train({gib})
    return weights, 1, {{}}

def evaluate(server_round, weights, config):
    train({gib})
    return 0.0, {{}}

if __name__ == "__main__":
    weights = [numpy.zeros(2, numpy.float32)]
    flower_gpu.GPUClient(fit, start_method="fork").fit(weights, {{}})
    flower_gpu.gpu_evaluate(evaluate, start_method="fork")(1, weights, {{}})
    flower_gpu.run_in_worker(train, {gib}, start_method="fork")
    flower_gpu.run_in_worker("task:train", {gib}, start_method="fork")
"""
MODULE = "import calls_tasks\n\ndef train(gib):\n    calls_tasks.follow([['train', gib, 1.0]])\n"


def test_functions_of_the_same_name_in_two_programs_have_separate_footprints(calls_host: CallsHost) -> None:
    """The functions are in scripts and in modules next to them. Many projects have a ``train`` in task.py."""
    folders = [calls_host.folder / "small", calls_host.folder / "large"]
    for folder, gib in zip(folders, (1.0, 6.0), strict=True):
        folder.mkdir()
        (folder / "client.py").write_text(SCRIPT.format(gib=gib))
        (folder / "task.py").write_text(MODULE)
    for folder in folders * 2:
        command = [sys.executable, str(folder / "client.py")]
        process = subprocess.run(command, env=calls_host.env, capture_output=True, text=True, timeout=100)
        assert process.returncode == 0, process.stderr
    small, large = lease_for(CONTEXT + 1.0), lease_for(CONTEXT + 6.0)
    assert calls_host.granted() == [0.0] * 8 + [small] * 4 + [large] * 4


def test_the_key_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "script.py")
    exec("def train(): ...\nclass Callable:\n    def __call__(self): ...", vars(main))
    (tmp_path / "task.py").touch()
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert task_key("package.module:function") == "package.module:function"
    assert task_key(Key.on) == task_key(partial(Key.on)) == "flower_gpu.leases.footprint_rule:Key.on"
    assert task_key("task:train") == f"{tmp_path}/task:train"
    assert task_key("tasks:train") == "tasks:train"
    assert task_key(main.train) == f"{tmp_path}/script.py:train"
    assert task_key(main.Callable()) == f"{tmp_path}/script.py:Callable"
    assert Call("os:getenv", ("no reference " * 1000,)).keys == ["os:getenv"]
