"""Tasks of the workers in these tests, most of which run a list of steps. Imports no heavy library."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import nvml_stub

import flower_gpu
from flower_gpu.leases.footprint import DEFAULT_CONTEXT_BYTES
from flower_gpu.leases.lease import Lease
from flower_gpu.workers import events
from flower_gpu.workers.forkserver import client

GIB = 1 << 30
# The waits should take an instant, but the machine may be busy.
WAIT_S = 60
SLEEP = "import time; time.sleep(600)"

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "FLOWER_GPU_LEASE", "PYTORCH_ALLOC_CONF")

Steps = Sequence[Sequence[Any]]


def seen() -> dict[str, Any]:
    """Return the pid of this worker and the variables that describe its lease."""
    return {"pid": os.getpid(), **{name: os.environ.get(name) for name in _VARIABLES}}


def send_events(*sent: dict[str, Any]) -> str:
    """Send the events to the caller 100 times."""
    for event in sent * 100:
        events.send(**event)
    return "done"


def follow(steps: Steps, weights: Any = None) -> dict[str, Any]:
    """Run the steps. Return their answers, and what :func:`seen` returns at the end."""
    answers = [_STEPS[name](*arguments, **_weights(name, weights)) for name, *arguments in steps]
    return {**seen(), "answers": answers}


def train(weights: list[Any], config: dict[str, Any], steps: Steps = ()) -> tuple[list[Any], int, Any]:
    """Run steps with the signature of a Flower training function. The server's config may contain them."""
    all_steps = json.loads(config.get("steps", "[]")) or steps
    result = follow(all_steps, weights)
    return weights, 1, {"visible": result["CUDA_VISIBLE_DEVICES"], "leased": bool(result["FLOWER_GPU_LEASE"])}


def evaluate(server_round: int, weights: Any, config: Any, steps: Steps = ()) -> dict[str, Any]:
    """Run the steps with the signature of a strategy's ``evaluate_fn``."""
    result = follow(steps)
    return {"loss": 1.0, "leased": float(bool(result["FLOWER_GPU_LEASE"])), "pid": result["pid"]}


def use_light_servers() -> None:
    """Use fork servers without torch if LIGHT_SERVERS is set, because the import of torch takes seconds."""
    if "LIGHT_SERVERS" in os.environ:
        client._memory.kind.without.add("torch")


def nested(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Make another call from within a worker."""
    use_light_servers()
    return [seen(), flower_gpu.run_in_worker("calls_tasks:seen", **options)]


PREPARED: list[int] = []


def prepare() -> None:
    """Record the process in which this preloaded function runs."""
    PREPARED.append(os.getpid())


def prepared() -> dict[str, Any]:
    """Return the processes that have run :func:`prepare` for this worker."""
    return {**seen(), "prepared_by": PREPARED}


def _weights(name: str, weights: Any) -> dict[str, Any]:
    return {"weights": weights} if name in ("modify", "check") else {}


# Steps ----------------------------------------------------------------------------------------------------


def _announce(path: str) -> None:
    """Write the pid of this process into a file, to announce that this step was reached."""
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(str(os.getpid()))
    temporary.rename(path)


def _wait(path: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not created")
        time.sleep(0.01)


def _allocate(size: float, text: str = "torch") -> str:
    """Allocate this many GiB more, as a framework does, if the lease and the free memory allow it."""
    lease = Lease.from_environment(os.environ)
    if lease is None or not lease.shares:
        return "on the CPU"
    (share,) = lease.shares
    requested_bytes = int(size * GIB)
    reserved = _ALLOCATED.get("reserved", 0)
    used = nvml_stub.used(share.uuid)
    if not reserved:
        # CUDA creates its context first.
        nvml_stub.allocate(share.uuid, DEFAULT_CONTEXT_BYTES)
    free = share.total_bytes - nvml_stub.used(share.uuid)
    if reserved + requested_bytes > share.cap_bytes or requested_bytes > free:
        raise _out_of_memory(text, requested_bytes, free, share.total_bytes)
    _ALLOCATED["reserved"] = reserved + requested_bytes
    nvml_stub.allocate(share.uuid, DEFAULT_CONTEXT_BYTES + reserved + requested_bytes)
    return f"{used / GIB:.1f}"


_ALLOCATED: dict[str, int] = {}


def _train(tensors: float, kept: float, pieces: float = 1.0, beside: float = 0.0) -> float:
    """Simulate the allocator of a training with PyTorch. Return the cap of this process in GiB.

    ``tensors``: size of the tensors in GiB.
    ``kept``: memory that the allocator reserves if the cap allows it, as a multiple of ``tensors``.
    ``pieces``: least memory that the allocator can work with, as a multiple of ``tensors``.
    ``beside``: memory of another library in GiB.
    """
    from flower_gpu import frameworks

    lease = Lease.from_environment(os.environ)
    assert lease is not None
    (share,) = lease.shares
    minimum, cap = int(tensors * pieces * GIB), share.cap_bytes
    reserved = min(int(tensors * kept * GIB), cap)
    nvml_stub.allocate(share.uuid, DEFAULT_CONTEXT_BYTES + reserved + int(beside * GIB))
    free = share.total_bytes - nvml_stub.used(share.uuid)
    allocated = int(tensors * GIB) if cap >= minimum else int(cap / pieces)
    figures = frameworks.Figures(reserved, reserved, allocated, allocated, free, share.total_bytes, 0)
    frameworks.reserved_bytes = lambda: [reserved]  # type: ignore[assignment]
    frameworks.figures = lambda: (figures,)  # type: ignore[assignment]
    if cap < minimum:
        raise _out_of_memory("torch class", int(tensors * GIB) - allocated, free, share.total_bytes)
    return round(cap / GIB, 2)


def _out_of_memory(text: str, requested_bytes: int, free: int, total: int) -> Exception:
    """Return the error that the named source would raise."""
    size = f"Tried to allocate {requested_bytes / GIB:.2f} GiB"
    capacity = f"GPU 0 has a total capacity of {total / GIB:.2f} GiB of which {free / GIB:.2f} GiB is free."
    if text == "raw":
        return RuntimeError(f"CUDA error: out of memory. {size}")
    if text == "torch class":
        import torch

        return torch.OutOfMemoryError(f"CUDA out of memory. {size}. {capacity}")
    return RuntimeError(f"CUDA out of memory. {size}. {capacity}")


def _modify(weights: Any) -> None:
    """Modify the weights in place, as a training does before it runs out of memory."""
    for array in weights:
        array += 1


def _check(weights: Any) -> list[float]:
    """Return the first value of each array of the weights."""
    return [float(np.asarray(array).ravel()[0]) for array in weights]


def _fail(kind: str, text: str) -> None:
    raise {"ValueError": ValueError, "KeyError": KeyError, "MemoryError": MemoryError}[kind](text)


def _child(path: str) -> None:
    """Fork a process as a DataLoader does. The child inherits all open files of this process."""
    pid = os.fork()
    if pid == 0:
        _announce(path)
        os.execv(sys.executable, [sys.executable, "-c", SLEEP]) if path.endswith("exec") else time.sleep(600)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _fill(mib: float, seconds: float) -> None:
    """Allocate main memory and keep it for some seconds."""
    array = np.ones(int(mib * (1 << 17)))
    time.sleep(seconds)
    del array


def _map(path: str) -> None:
    """Read a memory-mapped file, as data sets do, and keep it mapped."""
    with open(path, "rb") as file:
        _mapped_files.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    assert sum(_mapped_files[-1][:: mmap.PAGESIZE]) == 0


_mapped_files: list[mmap.mmap] = []


def _unlock() -> None:
    """Release every file lock of this process."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            fcntl.flock(int(path.name), fcntl.LOCK_UN)


_STEPS = {
    "unlock": _unlock,
    "fill": _fill,
    "map": _map,
    "announce": _announce,
    "wait": _wait,
    "allocate": _allocate,
    "train": _train,
    "modify": _modify,
    "check": _check,
    "fail": _fail,
    "child": _child,
    "sleep": _sleep,
}
