"""Calls on a card that one process at a time can compute on: real PyTorch, on the stand-in for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cuda_stub
import pytest
from nvml_stub import GIB

pytestmark = pytest.mark.timeout(180)

EXCLUSIVE_PROCESS = 3

# Clients side by side, as threads; each prints what came of its call.
CLIENTS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from flower_gpu import run_in_worker

def task():
    import os, torch
    from flower_gpu.leases.lease import Lease
    sent = torch.arange(8)
    came_back = sent.cuda().cpu()
    lease = Lease.from_environment(os.environ)
    return bool((sent == came_back).all()), lease.alone, lease.shares[0].memory_bytes

def client(number):
    try:
        options = {"gpu": "require", "gpu_memory": "2GiB", "lease_timeout_s": 100}
        return run_in_worker(task, start_method="spawn", **options)
    except Exception as error:
        return [type(error).__name__, str(error)]

count = int(sys.argv[1])
with ThreadPoolExecutor(count) as pool:
    print(json.dumps(list(pool.map(client, range(count)))))
"""


@pytest.fixture
def host(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> cuda_stub.Host:
    made = cuda_host(gpus=1)
    made.set(0, compute_mode=EXCLUSIVE_PROCESS)
    for name in ("LEDGER", "STATE"):
        folder = tmp_path / name
        folder.mkdir()
        folder.chmod(0o1777 if name == "LEDGER" else 0o700)
        made.env[f"FLOWER_GPU_{name}_DIR"] = str(folder)
    return made


def answers(host: cuda_stub.Host, count: int) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-c", CLIENTS, str(count)],
        env={**os.environ, **host.env},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[object]] = json.loads(done.stdout)
    return found


def test_each_call_on_a_card_for_one_process_has_it_to_itself(host: cuda_stub.Host) -> None:
    """There is room for seven; CUDA would refuse all but one of them."""
    for is_right, alone, memory_bytes in answers(host, 2):
        assert is_right is alone is True
        assert isinstance(memory_bytes, int) and memory_bytes > 15 * GIB


def test_a_card_that_another_program_has_unseen_is_told_with_what_to_set(host: cuda_stub.Host) -> None:
    host.set(0, unlisted=1)
    code = "import torch; torch.zeros(1, device='cuda'); print(flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **host.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        [[kind, text]] = answers(host, 1)
        other.kill()
    assert kind == "GPUUnavailableError"
    assert "compute mode is EXCLUSIVE_PROCESS" in str(text) and "nvidia-smi -i 0 -c DEFAULT" in str(text)
