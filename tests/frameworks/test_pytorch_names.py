"""PyTorch without what is not public in it: calls go on, capped, and what is lacking is said once.

On a stand-in for CUDA: memory, caps and errors are those of the PyTorch that is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import cuda_stub
import pytest
from torch_version import TAKES_CAP, TELLS_SETTINGS

from flower_gpu.frameworks import pytorch, pytorch_memory

pytestmark = pytest.mark.timeout(300)

MakeHost = Callable[..., cuda_stub.Host]
GIB = 2**30
# Without the one that says nothing about memory, and that PyTorch itself cannot do without.
NAMES = [name for name in pytorch_memory._NOT_PUBLIC if name != "_GLOBAL_DEVICE_CONTEXT"]

WITHOUT = """
import json, os, sys
import torch
from flower_gpu import frameworks
from flower_gpu.frameworks import Cap

def take_away(name):
    *places, last = name.split(".")
    owner = torch
    for place in places:
        owner = getattr(owner, place)
    if hasattr(owner, last):
        delattr(owner, last)

def fits(nbytes):
    try:
        torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return True
"""

# Each case in a fork, so that PyTorch is imported once.
HELD = (
    WITHOUT
    + """
def told(name):
    take_away(name)
    started = []
    with frameworks.held_to([Cap(4 << 30, 16 << 30)], lambda: started.append(True)) as (hold,):
        before = hold.in_force_bytes()
        fit = [fits(3 << 30), fits(5 << 30)]
        told = {"before": before, "fit": fit, "in_force": hold.in_force_bytes(), "started": started}
        told["free"] = frameworks.figures()[0].free_bytes
    return {**told, "after": fits(5 << 30), "lacks": frameworks.lacks()}

for name in sys.argv[1:]:
    if os.fork() == 0:
        print(json.dumps(told(name)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
)


def test_without_a_name_it_is_capped_and_says_what_is_lacking(
    cuda_host: MakeHost, run_script: Callable[..., Any]
) -> None:
    """A process is held to 4 of 16 GiB, with all that this version has, and without each name."""
    host = cuda_host(gpus=1, total=16 * GIB)
    env = {**host.env, pytorch.SETTINGS: "per_process_memory_fraction:0.25" if TAKES_CAP else ""}
    done = run_script(HELD, "nothing", *NAMES, env=env, timeout_s=280)
    found: dict[str, Any] = dict(zip(["", *NAMES], map(json.loads, done.stdout.splitlines()), strict=True))
    told = found.pop("")
    assert told["before"] == [4 * GIB if TELLS_SETTINGS else None]
    assert told["fit"] == [True, False] and told["after"]
    assert told["in_force"] == [4 * GIB] and told["started"] == [True]
    assert 0 < told["free"] < 16 * GIB
    if TAKES_CAP and not TELLS_SETTINGS:
        assert "_accelerator_getAllocatorSettings (seen in 2.12 to" in told["lacks"]
    else:
        assert told["lacks"] is None
    for name, told in found.items():
        if name.startswith("_C._accelerator") and not TAKES_CAP:
            continue  # this PyTorch takes no cap from the environment: none of it is looked for
        seen, effect = pytorch_memory._NOT_PUBLIC[name]
        assert f"torch.{name} (seen in {seen}): {effect}" in told["lacks"]
        if "_lazy_call" not in name or TAKES_CAP:
            assert told["fit"] == [True, False], name
            assert told["in_force"] == [4 * GIB], name
        assert (told["free"] is None) is (name == "_C._cuda_hasPrimaryContext")
        assert told["started"] == ([] if name == "cuda._lazy_call" else [True])


TASK = """
import torch

del torch._C._cuda_hasPrimaryContext

def take(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda").numel()
"""
CALLS = """
import logging, os, sys
sys.path.insert(0, os.path.dirname(__file__))
logging.basicConfig()
from flower_gpu import run_in_worker

for _ in range(2):
    print(run_in_worker("lacking_task:take", 1 << 30, gpu_memory="4GiB", start_method="forkserver"))
"""


def test_of_several_calls_the_first_one_says_so(
    cuda_host: MakeHost, run_script: Callable[..., Any], write_script: Callable[..., Any]
) -> None:
    write_script(TASK, "lacking_task.py")
    done = run_script(CALLS, env=cuda_host(gpus=1).env, timeout_s=280)
    assert done.stdout.split() == 2 * [str(GIB)]
    assert done.stderr.count("has no torch._C._cuda_hasPrimaryContext") == 1
