"""Tasks of workers with a lease. Importing this module imports no torch."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from flower_gpu import frameworks
from flower_gpu.frameworks import pytorch_memory

_READ: list[tuple[int, str]] = []


def read_settings() -> None:
    """Read PyTorch's allocator settings in the process that workers are forked from."""
    import torch

    _READ.append((os.getpid(), torch._C._accelerator_getAllocatorSettings()))


def settings_and_their_reader() -> tuple[int, str, str]:
    """Return the pid that read the settings first, their value there, and their value in this process."""
    import torch

    ((pid, before),) = _READ
    return pid, before, torch._C._accelerator_getAllocatorSettings()


def settings_of_its_own() -> tuple[str, list[int | None], str]:
    """Set the old variable before importing torch, as scripts do.

    PyTorch prefers the old variable over the new one, which has the cap.
    """
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    (hold,) = pytorch_memory._pending
    # This is the first step when CUDA starts.
    hold.follow_settings()
    return (
        torch._C._accelerator_getAllocatorSettings(),
        hold.in_force_bytes(),
        os.environ["PYTORCH_CUDA_ALLOC_CONF"],
    )


def threads_and_torch() -> tuple[list[str], bool]:
    """Return the names of this worker's threads, and True if torch was imported."""
    return sorted(thread.name for thread in threading.enumerate()), "torch" in sys.modules


def run_out_of_memory(text: str, broken: str = "") -> None:
    """Raise PyTorch's out-of-memory error as the cause of another. The `broken` function always fails."""
    import torch

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if broken:
        setattr(frameworks, broken, fail)
    raise ValueError("the training failed") from torch.OutOfMemoryError(text)


def reported(ticket: Path) -> dict[str, Any]:
    """Return the memory use that a worker has reported in its ticket."""
    record = ticket.read_bytes()[1 << 16 :].partition(b"\n")[0]
    report: dict[str, Any] = json.loads(record.partition(b" ")[2] or b"{}")
    return report


def use_stub_gpu(uuid: str, peak_bytes: int, end_bytes: int, error: str = "") -> tuple[dict[str, Any], int]:
    """Allocate `peak_bytes` of a stub GPU until they are reported, then change to `end_bytes`.

    If `peak_bytes` is zero, there is nothing to wait for.
    """
    from nvml_stub import allocate

    from flower_gpu.leases.lease import Lease

    lease = Lease.from_environment(os.environ)
    assert lease is not None
    ticket = Path(lease.ticket)
    if peak_bytes:
        allocate(uuid, peak_bytes)
        deadline = time.monotonic() + 30
        while reported(ticket).get("used") != {uuid: peak_bytes} and time.monotonic() < deadline:
            time.sleep(0.02)
    report = reported(ticket)
    allocate(uuid, end_bytes)
    if error:
        raise RuntimeError(error)
    return report, os.getpid()
