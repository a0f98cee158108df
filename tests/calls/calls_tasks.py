"""What the workers of these tests do: a task is told step by step. Nothing heavy is imported here."""

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
WAIT_S = 60  # for what should take an instant; the machine may be busy
SLEEP = "import time; time.sleep(600)"

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "FLOWER_GPU_LEASE", "PYTORCH_ALLOC_CONF")

Steps = Sequence[Sequence[Any]]


def seen() -> dict[str, Any]:
    """Return what this worker sees of its lease."""
    return {"pid": os.getpid(), **{name: os.environ.get(name) for name in _VARIABLES}}


def tell(*told: dict[str, Any]) -> str:
    """Send the caller any events, many times, and return something."""
    for event in told * 100:
        events.send(**event)
    return "done"


def follow(steps: Steps, weights: Any = None) -> dict[str, Any]:
    """Do these steps, and return what was seen at the end."""
    answers = [_STEPS[name](*arguments, **_weights(name, weights)) for name, *arguments in steps]
    return {**seen(), "answers": answers}


def train(weights: list[Any], config: dict[str, Any], steps: Steps = ()) -> tuple[list[Any], int, Any]:
    """Train as Flower wants it; the steps may come from the server."""
    told = json.loads(config.get("steps", "[]")) or steps
    found = follow(told, weights)
    return weights, 1, {"visible": found["CUDA_VISIBLE_DEVICES"], "leased": bool(found["FLOWER_GPU_LEASE"])}


def evaluate(server_round: int, weights: Any, config: Any, steps: Steps = ()) -> dict[str, Any]:
    """Evaluate as a strategy wants it."""
    found = follow(steps)
    return {"loss": 1.0, "leased": float(bool(found["FLOWER_GPU_LEASE"])), "pid": found["pid"]}


def use_light_servers() -> None:
    """Have this process use fork servers without torch, if it is told to: importing it takes seconds."""
    if "LIGHT_SERVERS" in os.environ:
        client._memory.kind.without.add("torch")


def nested(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run another call from within a worker."""
    use_light_servers()
    return [seen(), flower_gpu.run_in_worker("calls_tasks:seen", **options)]


PREPARED: list[int] = []


def prepare() -> None:
    """Load what all workers need."""
    PREPARED.append(os.getpid())


def prepared() -> dict[str, Any]:
    """Return where what was loaded comes from."""
    return {**seen(), "prepared_by": PREPARED}


def _weights(name: str, weights: Any) -> dict[str, Any]:
    return {"weights": weights} if name in ("spoil", "check") else {}


# Steps ----------------------------------------------------------------------------------------------------


def _tell(path: str) -> None:
    """Say that this step was reached, and in which process."""
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(str(os.getpid()))
    temporary.rename(path)


def _wait(path: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {path}")
        time.sleep(0.01)


def _take(size: float, text: str = "torch") -> str:
    """Take so many GiB more, as a framework does: in its lease, and of what the GPU has free."""
    lease = Lease.from_environment(os.environ)
    if lease is None or not lease.shares:
        return "on the CPU"
    (share,) = lease.shares
    asked = int(size * GIB)
    reserved = _TAKEN.get("reserved", 0)
    used = nvml_stub.used(share.uuid)
    if not reserved:
        nvml_stub.allocate(share.uuid, DEFAULT_CONTEXT_BYTES)  # CUDA starts
    free = share.total_bytes - nvml_stub.used(share.uuid)
    if reserved + asked > share.cap_bytes or asked > free:
        raise _out_of_memory(text, asked, free, share.total_bytes)
    _TAKEN["reserved"] = reserved + asked
    nvml_stub.allocate(share.uuid, DEFAULT_CONTEXT_BYTES + reserved + asked)
    return f"{used / GIB:.1f}"


_TAKEN: dict[str, int] = {}


def _train(tensors: float, kept: float, pieces: float = 1.0, beside: float = 0.0) -> float:
    """Be a training with PyTorch, by the figures of its allocator; return the GiB that it might have.

    Tensors have so many GiB. The allocator keeps ``kept`` times that where it may, and can do with ``pieces``
    times that. Another library has ``beside`` GiB.
    """

    from flower_gpu import frameworks

    lease = Lease.from_environment(os.environ)
    assert lease is not None
    (share,) = lease.shares
    least, cap = int(tensors * pieces * GIB), share.cap_bytes
    reserved = min(int(tensors * kept * GIB), cap)
    nvml_stub.allocate(share.uuid, DEFAULT_CONTEXT_BYTES + reserved + int(beside * GIB))
    free = share.total_bytes - nvml_stub.used(share.uuid)
    allocated = int(tensors * GIB) if cap >= least else int(cap / pieces)
    figures = frameworks.Figures(reserved, reserved, allocated, allocated, free, share.total_bytes, 0)
    frameworks.reserved_bytes = lambda: [reserved]  # type: ignore[assignment]
    frameworks.figures = lambda: (figures,)  # type: ignore[assignment]
    if cap < least:
        raise _out_of_memory("torch class", int(tensors * GIB) - allocated, free, share.total_bytes)
    return round(cap / GIB, 2)


def _out_of_memory(text: str, asked: int, free: int, total: int) -> Exception:
    """Return the error, in the words of those who raise it."""
    size = f"Tried to allocate {asked / GIB:.2f} GiB"
    there = f"GPU 0 has a total capacity of {total / GIB:.2f} GiB of which {free / GIB:.2f} GiB is free."
    if text == "raw":
        return RuntimeError(f"CUDA error: out of memory. {size}")
    if text == "torch class":
        import torch

        return torch.OutOfMemoryError(f"CUDA out of memory. {size}. {there}")
    return RuntimeError(f"CUDA out of memory. {size}. {there}")


def _spoil(weights: Any) -> None:
    """Change the weights in place, as a training does before it runs out of memory."""
    for array in weights:
        array += 1


def _check(weights: Any) -> list[float]:
    """Return what the weights are."""
    return [float(np.asarray(array).ravel()[0]) for array in weights]


def _fail(kind: str, text: str) -> None:
    raise {"ValueError": ValueError, "KeyError": KeyError, "MemoryError": MemoryError}[kind](text)


def _child(path: str) -> None:
    """Start a process as a DataLoader starts its workers: it has all that this one has open."""
    pid = os.fork()
    if pid == 0:
        _tell(path)
        os.execv(sys.executable, [sys.executable, "-c", SLEEP]) if path.endswith("exec") else time.sleep(600)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _fill(mib: float, seconds: float) -> None:
    """Take main memory, and keep it for a while."""
    taken = np.ones(int(mib * (1 << 17)))
    time.sleep(seconds)
    del taken


def _map(path: str) -> None:
    """Read a file that is mapped, as data sets are, and keep it mapped."""
    with open(path, "rb") as file:
        _mapped.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    assert sum(_mapped[-1][:: mmap.PAGESIZE]) == 0


_mapped: list[mmap.mmap] = []


def _unlock() -> None:
    """Give up every lock that this process can."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            fcntl.flock(int(path.name), fcntl.LOCK_UN)


_STEPS = {
    "unlock": _unlock,
    "fill": _fill,
    "map": _map,
    "tell": _tell,
    "wait": _wait,
    "take": _take,
    "train": _train,
    "spoil": _spoil,
    "check": _check,
    "fail": _fail,
    "child": _child,
    "sleep": _sleep,
}
