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
    """Use PyTorch's settings in the process that workers are forked from."""
    import torch

    _READ.append((os.getpid(), torch._C._accelerator_getAllocatorSettings()))


def settings_and_their_reader() -> tuple[int, str, str]:
    """Return the process that has read them first, what they were there, and what they are here."""
    import torch

    ((pid, before),) = _READ
    return pid, before, torch._C._accelerator_getAllocatorSettings()


def settings_of_its_own() -> tuple[str, list[int | None], str]:
    """Set the old name before importing torch, as scripts do; it wins over the one that has the cap."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    (hold,) = pytorch_memory._pending
    hold.follow_settings()  # the first thing that happens when CUDA starts
    return (
        torch._C._accelerator_getAllocatorSettings(),
        hold.in_force_bytes(),
        os.environ["PYTORCH_CUDA_ALLOC_CONF"],
    )


def threads_and_torch() -> tuple[list[str], bool]:
    """Return this worker's threads, and whether there is torch, with a task that needs none."""
    return sorted(thread.name for thread in threading.enumerate()), "torch" in sys.modules


def run_out_of_memory(text: str, broken: str = "") -> None:
    """Fail as PyTorch does, in the words of a training function; a function of ``frameworks`` is broken."""
    import torch

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if broken:
        setattr(frameworks, broken, fail)
    raise ValueError("the training failed") from torch.OutOfMemoryError(text)


def reported(ticket: Path) -> dict[str, Any]:
    """Return what a ticket says of its worker's use."""
    record = ticket.read_bytes()[1 << 16 :].partition(b"\n")[0]
    told: dict[str, Any] = json.loads(record.partition(b" ")[2] or b"{}")
    return told


def use_stub_gpu(uuid: str, peak_bytes: int, end_bytes: int, error: str = "") -> tuple[dict[str, Any], int]:
    """Take memory of a GPU that is not there, until it is reported where there is a peak; then less."""
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
    seen = reported(ticket)
    allocate(uuid, end_bytes)
    if error:
        raise RuntimeError(error)
    return seen, os.getpid()
