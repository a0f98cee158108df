"""Tasks that tests run in workers with a lease. This module does not import torch until a task needs it."""

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

# Pid and allocator settings of the process that called read_settings(). Its forks inherit them.
_settings_read: list[tuple[int, str]] = []


def read_settings() -> None:
    """Read PyTorch's allocator settings. A fork server calls this as a preload, before it forks workers."""
    import torch

    _settings_read.append((os.getpid(), torch._C._accelerator_getAllocatorSettings()))


def settings_and_their_reader() -> tuple[int, str, str]:
    """Return the fork server's pid, the allocator settings that it read, and those of this worker."""
    import torch

    ((server_pid, server_settings),) = _settings_read
    return server_pid, server_settings, torch._C._accelerator_getAllocatorSettings()


def settings_of_its_own() -> tuple[str, list[int | None], str]:
    """Set PyTorch's old variable for the allocator before importing torch, as scripts do.

    The worker's cap is in the new variable. PyTorch ignores the new variable if the old one is set, so the
    cap has to be added to the old one. Returns the settings that PyTorch uses, the limit in bytes on each
    GPU, and the value of the old variable.
    """
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    (hold,) = pytorch_memory._pending
    # The hold does this first when CUDA starts, which needs a GPU. So call it here.
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
    """Raise an error that is caused by PyTorch's out-of-memory error with this text.

    `broken`: name of a function of `frameworks` that fails from now on, like any use of CUDA after a fault.
    """
    import torch

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if broken:
        setattr(frameworks, broken, fail)
    raise ValueError("the training failed") from torch.OutOfMemoryError(text)


def reported(ticket: Path) -> dict[str, Any]:
    """Return the memory use that a worker has reported in its ticket, or {} without a report."""
    # The report is one line at this offset: a checksum, a space, and JSON.
    record = ticket.read_bytes()[1 << 16 :].partition(b"\n")[0]
    report: dict[str, Any] = json.loads(record.partition(b" ")[2] or b"{}")
    return report


def use_stub_gpu(uuid: str, peak_bytes: int, end_bytes: int, error: str = "") -> tuple[dict[str, Any], int]:
    """Allocate `peak_bytes` on a stub GPU and wait for a report of them. Then change the use to `end_bytes`.

    If `peak_bytes` is zero, do not wait. Returns the last report before the change, and this worker's pid.
    Raises RuntimeError with the text `error` instead, unless it is empty.
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
