"""The stand-in for CUDA: what PyTorch finds there is what NVML tells, and what a card would do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cuda_stub
from cuda_stub import GIB, MIB

pytestmark = pytest.mark.timeout(120)

MakeHost = Callable[..., cuda_stub.Host]
CONTEXT = 450 * MIB

BEGIN = """
import ctypes, json, os, sys, time
import torch

def tell(**told):
    print(json.dumps(told), flush=True)

def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
"""


class Program:
    """A program on a host: it tells a line, waits for one, and goes on."""

    def __init__(self, host: cuda_stub.Host, text: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + textwrap.dedent(text)],
            env={**os.environ, **host.env, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tells(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program has ended with {self.process.wait()}"
        told: dict[str, Any] = json.loads(line)
        return told

    def goes_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self) -> None:
        self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*args: Any, **variables: str) -> Program:
        started.append(Program(*args, **variables))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


Start = Callable[..., Program]

HOLDS = """
held = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
tell(free=torch.cuda.mem_get_info()[0], total=torch.cuda.mem_get_info()[1], pid=os.getpid())
sys.stdin.readline()
""".replace("GIB", str(GIB))


def test_memory_is_what_nvml_tells(cuda_host: MakeHost, program: Start) -> None:
    host = cuda_host(gpus=2)
    host.program(1, 3 * GIB)
    one = program(host, HOLDS, CUDA_VISIBLE_DEVICES="1")
    told = one.tells()
    assert told["total"] == 16 * GIB
    assert told["free"] == 16 * GIB - 3 * GIB - GIB - CONTEXT
    assert (host.used(0), host.used(1)) == (0, 3 * GIB + GIB + CONTEXT)
    one.ends()
    assert host.used(1) == 3 * GIB


def test_a_killed_program_gives_its_memory_back_and_the_next_one_clears_up(
    cuda_host: MakeHost, program: Start
) -> None:
    host = cuda_host(gpus=1)
    one = program(host, HOLDS)
    one.tells()
    one.process.send_signal(signal.SIGKILL)
    one.process.wait()
    assert host.used(0) == 0
    assert any(path.name[0].isdigit() for path in (host.folder / "use").iterdir())
    other = program(host, HOLDS)
    pid = other.tells()["pid"]
    files = [path.name for path in (host.folder / "use").iterdir() if path.name[0].isdigit()]
    assert [name.partition(".")[0] for name in files] == [str(pid)]


def test_memory_runs_out_by_the_cap_and_by_the_card(cuda_host: MakeHost, program: Start) -> None:
    host = cuda_host(gpus=1, total=8 * GIB)
    text = """
    torch.cuda.set_per_process_memory_fraction(0.25)
    take = lambda gib: error_of(lambda: torch.empty(gib << 30, dtype=torch.uint8, device="cuda"))
    tell(fits=take(1), cap=take(3))
    torch.cuda.set_per_process_memory_fraction(1.0)
    tell(card=take(20), ooms=torch.cuda.memory_stats()["num_ooms"])
    """
    for settings in ("", "expandable_segments:True"):
        one = program(host, text, PYTORCH_CUDA_ALLOC_CONF=settings)
        told = one.tells()
        assert told["fits"] == ""
        assert told["cap"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB")
        assert "2.00 GiB allowed" in told["cap"]
        told = one.tells()
        assert told["card"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB")
        assert told["ooms"] == 2
        one.ends()
        assert host.used(0) == 0


def test_a_second_program_is_refused_in_exclusive_mode(cuda_host: MakeHost, program: Start) -> None:
    host = cuda_host(gpus=1)
    host.set(0, compute_mode=3)
    first = program(host, HOLDS)
    first.tells()
    tries = 'tell(error=error_of(lambda: torch.zeros(1, device="cuda")))'
    assert "busy or unavailable" in program(host, tries).tells()["error"]
    first.ends()
    assert program(host, tries).tells()["error"] == ""


def test_a_lost_card_answers_999_from_then_on(cuda_host: MakeHost, program: Start) -> None:
    host = cuda_host(gpus=1)
    text = """
    torch.zeros(1, device="cuda")
    for _ in range(2):
        tell()
        sys.stdin.readline()
        tell(error=error_of(lambda: torch.cuda.synchronize()))
    """
    one = program(host, text)
    one.tells()
    host.set(0, lost=True)
    one.goes_on()
    assert "unknown error" in one.tells()["error"]
    one.tells()
    host.set(0, lost=False)
    one.goes_on()
    assert "unknown error" in one.tells()["error"]


def test_a_fork_cannot_use_what_its_parent_has_started(cuda_host: MakeHost, program: Start) -> None:
    text = """
    torch.zeros(1, device="cuda")
    count = ctypes.c_int()
    parent = ctypes.CDLL("libcuda.so.1").cuInit(0)
    pid = os.fork()
    if pid == 0:
        tell(
            torch=error_of(lambda: torch.zeros(1, device="cuda")),
            driver=ctypes.CDLL("libcuda.so.1").cuInit(0),
            parent=parent,
        )
        os._exit(0)
    os.waitpid(pid, 0)
    """
    told = program(cuda_host(gpus=1), text).tells()
    assert "Cannot re-initialize CUDA in forked subprocess" in told["torch"]
    assert (told["parent"], told["driver"]) == (0, 3)


def test_visible_devices(cuda_host: MakeHost, program: Start) -> None:
    host = cuda_host(gpus=3)
    (_, mig) = host.mig(2, [4 * GIB, 8 * GIB])
    text = """
    for visible in json.loads(os.environ["CASES"]):
        if os.fork() == 0:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            tell(uuids=[str(one.uuid) for one in found], sizes=[one.total_memory for one in found])
            os._exit(0)
        os.wait()
    """
    uuids = [uuid.removeprefix("GPU-") for uuid in host.uuids]
    cases = {
        "1,0": [uuids[1], uuids[0]],
        "1,7,0": [uuids[1]],
        host.uuids[1]: [uuids[1]],
        host.uuids[0][:12]: [uuids[0]],
        mig: [mig.removeprefix("MIG-")],
        "": [],
    }
    # PyTorch's look at NVML knows no beginnings of UUIDs of MIG devices; here CUDA is asked.
    forking = program(host, text, CASES=json.dumps([*cases]), PYTORCH_NVML_BASED_CUDA_CHECK="0")
    told = {visible: forking.tells() for visible in cases}
    assert {visible: found["uuids"] for visible, found in told.items()} == cases
    assert told[mig]["sizes"] == [8 * GIB]


def test_contexts_and_kernels_take_their_time(cuda_host: MakeHost, program: Start) -> None:
    host = cuda_host(gpus=1)
    host.set(0, context=GIB, context_ms=300, kernel_us=50_000)
    text = """
    began = time.monotonic()
    numbers = torch.empty(10, device="cuda")
    context_s = time.monotonic() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    begin.record()
    began = time.monotonic()
    for _ in range(4):
        numbers + 1
    end.record()
    is_side_idle = side.query()
    torch.cuda.synchronize()
    tell(context_s=context_s, is_side_idle=is_side_idle, whole_s=time.monotonic() - began,
         elapsed_ms=begin.elapsed_time(end), is_done=end.query())
    sys.stdin.readline()
    """
    one = program(host, text)
    told = one.tells()
    assert host.used(0) == GIB + 2 * MIB
    assert told["context_s"] >= 0.3
    assert told["whole_s"] >= 0.2
    assert told["elapsed_ms"] >= 200
    assert told["is_side_idle"]
    assert told["is_done"]


def test_memory_is_pinned_and_copied(cuda_host: MakeHost, program: Start) -> None:
    text = """
    numbers = torch.arange(1000.0)
    pinned = numbers.pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    back = torch.empty(1000, pin_memory=True).copy_(there)
    tell(is_pinned=pinned.is_pinned() and back.is_pinned(), device=str(there.device),
         same=bool((back == numbers).all()), plain=numbers.is_pinned())
    """
    told = program(cuda_host(gpus=1), text).tells()
    assert told == {"is_pinned": True, "device": "cuda:0", "same": True, "plain": False}


def test_a_driver_that_is_too_old(cuda_host: MakeHost, program: Start) -> None:
    host = cuda_host(gpus=1)
    host.set_cuda(11040)
    text = 'tell(there=torch.cuda.is_available(), error=error_of(lambda: torch.zeros(1, device="cuda")))'
    told = program(host, text).tells()
    assert told["there"] is False
    assert "driver" in told["error"] and "too old" in told["error"]


def test_a_new_driver_names_a_thread(cuda_host: MakeHost, program: Start) -> None:
    text = """
    torch.zeros(1, device="cuda")
    tasks = os.listdir("/proc/self/task")
    tell(names=[open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks])
    """
    for driver, is_named in (("580.65.06", True), ("550.54.14", False)):
        host = cuda_host(gpus=1, driver=driver)
        assert ("cuda-EvtHandlr" in program(host, text).tells()["names"]) == is_named
