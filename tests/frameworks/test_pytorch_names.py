"""If PyTorch lacks private names that we use, calls still work under their cap, and one message says so.

CUDA is a stand-in, but memory, caps and errors come from the installed PyTorch.
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
# _GLOBAL_DEVICE_CONTEXT is left out: PyTorch itself needs it, and it has nothing to do with memory.
NAMES = [name for name in pytorch_memory._NOT_PUBLIC if name != "_GLOBAL_DEVICE_CONTEXT"]

WITHOUT = """
import json, os, sys
import torch
from flower_gpu import frameworks
from flower_gpu.frameworks import Cap

def remove(name):
    *parents, last = name.split(".")
    owner = torch
    for parent in parents:
        owner = getattr(owner, parent)
    if hasattr(owner, last):
        delattr(owner, last)

def fits(nbytes):
    try:
        torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return True
"""

# Each case runs in a fork, so that PyTorch is imported only once.
HELD = (
    WITHOUT
    + """
def report_without(name):
    remove(name)
    with frameworks.held_to([Cap(4 << 30, 16 << 30)]) as (hold,):
        before = hold.in_force_bytes()
        fit = [fits(3 << 30), fits(5 << 30)]
        report = {"before": before, "fit": fit, "in_force": hold.in_force_bytes()}
        report["free"] = frameworks.figures()[0].free_bytes
    return {**report, "after": fits(5 << 30), "lacks": frameworks.lacks()}

for name in sys.argv[1:]:
    if os.fork() == 0:
        print(json.dumps(report_without(name)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
)


def test_without_a_private_name_pytorch_is_capped_and_the_name_is_reported(
    cuda_host: MakeHost, run_script: Callable[..., Any]
) -> None:
    """A process is held to 4 of 16 GiB, first with all names of this version and then without each one."""
    host = cuda_host(gpus=1, total=16 * GIB)
    env = {**host.env, pytorch.SETTINGS: "per_process_memory_fraction:0.25" if TAKES_CAP else ""}
    completed = run_script(HELD, "nothing", *NAMES, env=env, timeout_s=280)
    lines = map(json.loads, completed.stdout.splitlines())
    reports: dict[str, Any] = dict(zip(["", *NAMES], lines, strict=True))
    report = reports.pop("")
    assert report["before"] == [4 * GIB if TELLS_SETTINGS else None]
    assert report["fit"] == [True, False] and report["after"]
    assert report["in_force"] == [4 * GIB]
    assert 0 < report["free"] < 16 * GIB
    if TAKES_CAP and not TELLS_SETTINGS:
        assert "_accelerator_getAllocatorSettings (seen in 2.12 to" in report["lacks"]
    else:
        assert report["lacks"] is None
    for name, report in reports.items():
        if name.startswith("_C._accelerator") and not TAKES_CAP:
            continue  # only used by versions that read their cap from the environment
        seen, effect = pytorch_memory._NOT_PUBLIC[name]
        assert f"torch.{name} (seen in {seen}): {effect}" in report["lacks"]
        if "_lazy_call" not in name or TAKES_CAP:
            assert report["fit"] == [True, False], name
            assert report["in_force"] == [4 * GIB], name
        assert (report["free"] is None) is (name == "_C._cuda_hasPrimaryContext")


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


def test_only_the_first_of_several_calls_reports_a_missing_name(
    cuda_host: MakeHost, run_script: Callable[..., Any], write_script: Callable[..., Any]
) -> None:
    write_script(TASK, "lacking_task.py")
    completed = run_script(CALLS, env=cuda_host(gpus=1).env, timeout_s=280)
    assert completed.stdout.split() == 2 * [str(GIB)]
    assert completed.stderr.count("has no torch._C._cuda_hasPrimaryContext") == 1
