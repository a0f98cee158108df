"""Tasks written for a whole host: they set PyTorch's limit, or use a GPU by its number on the host."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stub
import pytest

pytestmark = pytest.mark.timeout(400)

TASK = """
import warnings

GIB = 2**30

def limits(device):
    import torch
    from torch.cuda.memory import get_per_process_memory_fraction, set_per_process_memory_fraction
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_per_process_memory_fraction(1.0, device)  # CUDA has not started
        granted = get_per_process_memory_fraction()
        torch.cuda.set_per_process_memory_fraction(1.0)
        again = get_per_process_memory_fraction()
        torch.cuda.set_per_process_memory_fraction(granted / 2, device)
        smaller = get_per_process_memory_fraction() / granted
        torch.cuda.set_per_process_memory_fraction(granted)
    refused = []
    for wrong in (1, 1.5, -0.5):
        try:
            torch.cuda.set_per_process_memory_fraction(wrong)
        except (TypeError, ValueError) as error:
            refused.append(type(error).__name__)
    try:
        torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        is_held = True
    else:
        is_held = False
    return {
        "granted_gib": granted * torch.cuda.get_device_properties(0).total_memory / GIB,
        "is_kept": again == granted, "smaller": smaller, "is_held": is_held, "refused": refused,
        "warnings": [(str(w.message), w.category.__name__, w.filename) for w in caught],
    }

def second_card():
    import torch
    torch.zeros(1, device="cuda:1")
"""
CALL = """
import json, os, sys
sys.path.insert(0, os.path.dirname(__file__))
from flower_gpu import run_in_worker

options = {"gpu": "require", "gpu_memory": "3GiB"}
for device in (None, 0, "cuda:0"):
    print(json.dumps(run_in_worker("task_of_a_host:limits", device, **options)))
for more in ({}, {"num_gpus": 2, "gpu_memory": None}):
    try:
        run_in_worker("task_of_a_host:second_card", **{**options, **more})
    except Exception as error:
        print(json.dumps(str(error)))
    else:
        print(json.dumps("it has run"))
"""


def test_a_task_cannot_raise_its_limit_or_use_the_number_of_another_gpu(
    cuda_host: Callable[..., cuda_stub.Host],
    run_script: Callable[..., Any],
    write_script: Callable[..., Path],
) -> None:
    host = cuda_host(gpus=2)
    script = write_script(TASK, "task_of_a_host.py")
    completed = run_script(CALL, env=host.env, timeout_s=380)
    *limits, second, with_two_gpus = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(limits) == 3
    for report in limits:
        assert report["granted_gib"] <= 3 and report["is_kept"] and report["is_held"], report
        assert report["smaller"] == pytest.approx(0.5)
        assert report["refused"] == ["TypeError", "ValueError", "ValueError"]
        assert len(report["warnings"]) == 2, "one warning for each attempt to raise the limit"
        for text, category, file in report["warnings"]:
            assert re.fullmatch(
                r"set_per_process_memory_fraction\(1\) has no effect: the lease of this call grants 0\.\d+ "
                r"of the GPU's memory, and that stays the limit\. .*gpu_memory.*",
                text,
            )
            assert (category, file) == ("RuntimeWarning", str(script))
    assert "invalid device ordinal (a worker sees only the GPU of its lease, as cuda:0; write" in second
    assert with_two_gpus == "it has run"
