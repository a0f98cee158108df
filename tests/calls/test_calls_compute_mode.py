"""Calls on a GPU in compute mode EXCLUSIVE_PROCESS, with real PyTorch on the stand-in for CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import cuda_stub
import pytest
from nvml_stub import GIB

pytestmark = pytest.mark.timeout(180)

EXCLUSIVE_PROCESS = 3

# Reads numbers of clients, makes their calls in concurrent threads, and prints the results. For a 0, it forks
# another program that uses the GPU.
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


def test_each_call_on_an_exclusive_gpu_runs_alone_or_gets_advice(
    cuda_host: Callable[..., cuda_stub.Host],
) -> None:
    """Seven calls would fit, but CUDA admits only one process, and none next to a program that NVML hides."""
    host = cuda_host(gpus=1)
    host.set(0, compute_mode=EXCLUSIVE_PROCESS)
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENTS],
        env={**os.environ, **host.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def reply_to(count: int) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        return process.stdout.readline()

    with process:
        try:
            for is_correct, alone, memory_bytes in json.loads(reply_to(2)):
                assert is_correct is alone is True
                assert isinstance(memory_bytes, int) and memory_bytes > 15 * GIB
            host.set(0, unlisted=1)
            assert reply_to(0) == "has it\n"
            [[kind, text]] = json.loads(reply_to(1))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert kind == "GPUUnavailableError"
    assert "compute mode is EXCLUSIVE_PROCESS" in str(text) and "nvidia-smi -i 0 -c DEFAULT" in str(text)
