"""Calls with real PyTorch on the stand-in for CUDA, in compute mode EXCLUSIVE_PROCESS and by default.

A reused worker returns its result without waiting for its last query of the driver.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cuda_stub
import pytest
from nvml_stub import GIB
from waiting import until

pytestmark = pytest.mark.timeout(180)

TESTS = Path(__file__).parents[1]
EXCLUSIVE_PROCESS = 3

Reply = Callable[[object], str]

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


@contextmanager
def answering(host: cuda_stub.Host, *command: str) -> Iterator[tuple[subprocess.Popen[str], Reply]]:
    """Start a program on a host. Yield it, and a function that sends it a line and returns its reply."""
    folders = [TESTS, TESTS / "workers", TESTS / "calls"]
    with subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **host.env, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:

        def reply_to(line: object) -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return process.stdout.readline()

        try:
            yield process, reply_to
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_each_call_on_an_exclusive_gpu_runs_alone_or_gets_advice(
    cuda_host: Callable[..., cuda_stub.Host],
) -> None:
    """Seven calls would fit, but CUDA admits only one process, and none next to a program that NVML hides."""
    host = cuda_host(gpus=1)
    host.set(0, compute_mode=EXCLUSIVE_PROCESS)
    with answering(host, "-c", CLIENTS) as (_, reply_to):
        for is_correct, alone, memory_bytes in json.loads(reply_to(2)):
            assert is_correct is alone is True
            assert isinstance(memory_bytes, int) and memory_bytes > 15 * GIB
        host.set(0, unlisted=1)
        assert reply_to(0) == "has it\n"
        [[kind, text]] = json.loads(reply_to(1))
    assert kind == "GPUUnavailableError"
    assert "compute mode is EXCLUSIVE_PROCESS" in str(text) and "nvidia-smi -i 0 -c DEFAULT" in str(text)


# The last query of the driver -------------------------------------------------------------------------------

CONTEXT_BYTES = 450 << 20
LOOK = "nvmlDeviceGetHandleByUUID"


def test_a_later_result_does_not_wait_for_the_last_look(cuda_host: Callable[..., cuda_stub.Host]) -> None:
    host = cuda_host(gpus=2, context=CONTEXT_BYTES)
    script = str(TESTS / "calls" / "last_look_tasks.py")
    with answering(host, script, host.uuids[1]) as (process, reply_to):

        def call(*arguments: float) -> tuple[int, dict[str, Any]]:
            pid, figures = json.loads(reply_to(json.dumps(arguments)))
            return pid, figures

        host.count_calls()
        pid, first = call(1000.0)
        assert first["context_bytes"] == CONTEXT_BYTES
        looks = host.calls()[pid]
        assert looks[LOOK] >= 1
        assert not [name for name in looks if "ByIndex" in name or "GetCount" in name]
        host.hang(LOOK, pid)
        assert call() == (pid, first | {"reserved_before_bytes": 32 << 20})
        until(lambda: host.hanging() == {pid})
        host.go_on()
        until(lambda: host.calls()[pid][LOOK] > looks[LOOK])
        process.communicate(timeout=60)
    assert process.returncode == 0
