"""Calls on a card that one process at a time can compute on: real PyTorch, on the stand-in for CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cuda_stub
import pytest
from nvml_stub import GIB

pytestmark = pytest.mark.timeout(180)

EXCLUSIVE_PROCESS = 3

# Reads numbers of clients that call side by side, as threads, and prints what came of their calls. With 0 a
# fork of it becomes another program that has the card.
CLIENTS = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from flower_gpu import run_in_worker
from flower_gpu.leases.lease import Lease

def task():
    sent = torch.arange(8)
    came_back = sent.cuda().cpu()
    lease = Lease.from_environment(os.environ)
    return bool((sent == came_back).all()), lease.alone, lease.shares[0].memory_bytes

def client(number):
    try:
        options = {"gpu": "require", "gpu_memory": "2GiB", "lease_timeout_s": 100}
        return run_in_worker(task, start_method="fork", **options)
    except Exception as error:
        return [type(error).__name__, str(error)]

for line in sys.stdin:
    count = int(line)
    if count:
        with ThreadPoolExecutor(count) as pool:
            print(json.dumps(list(pool.map(client, range(count)))), flush=True)
    elif os.fork() == 0:
        torch.zeros(1, device="cuda")
        print("has it", flush=True)
        time.sleep(600)
"""


def test_each_call_on_a_card_for_one_process_has_it_to_itself_or_is_told_what_to_set(
    cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path
) -> None:
    """There is room for seven; CUDA would refuse all but one of them, and all beside a program unseen."""
    host = cuda_host(gpus=1)
    host.set(0, compute_mode=EXCLUSIVE_PROCESS)
    ledger = tmp_path / "ledger"
    ledger.mkdir(mode=0o1777)
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENTS],
        env={**os.environ, **host.env, "FLOWER_GPU_LEDGER_DIR": str(ledger)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def answer(count: int) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        return process.stdout.readline()

    with process:
        try:
            for is_right, alone, memory_bytes in json.loads(answer(2)):
                assert is_right is alone is True
                assert isinstance(memory_bytes, int) and memory_bytes > 15 * GIB
            host.set(0, unlisted=1)
            assert answer(0) == "has it\n"
            [[kind, text]] = json.loads(answer(1))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert kind == "GPUUnavailableError"
    assert "compute mode is EXCLUSIVE_PROCESS" in str(text) and "nvidia-smi -i 0 -c DEFAULT" in str(text)
