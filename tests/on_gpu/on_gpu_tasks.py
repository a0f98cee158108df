"""Tasks of workers with leases on a real GPU; see test_leases_on_gpu.py. Importing this imports no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

_WAIT_S = 100.0


def take(nbytes: int) -> dict[str, Any]:
    """Take memory in one piece, and return what then is known of this process."""
    import torch

    held = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    figures = {"reserved": torch.cuda.memory_reserved(), "driver": _of_driver(), "pid": os.getpid()}
    del held
    return figures


def take_with_settings_of_its_own(nbytes: int) -> dict[str, Any]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return take(nbytes)


def take_all(piece: int) -> int:
    """Take pieces until there are no more."""
    import torch

    held = []
    try:
        while True:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return len(held) * piece


def take_when(begun: str, then: str, nbytes: int) -> bool:
    """Start CUDA, say so, and take memory when somebody says so; the second time at once."""
    import torch

    held = [torch.zeros(1, device="cuda")]
    Path(begun).touch()
    wait_for(Path(then))
    held.append(torch.zeros(nbytes, dtype=torch.uint8, device="cuda"))
    return True


def take_nearly_all_of_the_lease(folder: str, count: int) -> int:
    """Take all but 64 MiB of the cap; keep it until as many workers as there should be have done so."""
    import torch

    from flower_gpu.leases.lease import Lease

    lease = Lease.from_environment(os.environ)
    assert lease is not None
    nbytes = lease.shares[0].cap_bytes - (64 << 20)
    held = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    (Path(folder) / f"{os.getpid()}.there").touch()
    wait_for(Path(folder), count)
    return held.numel()


def more_than_there_is(nbytes: int) -> str:
    """Take more than the GPU has, where there is one."""
    import torch

    import flower_gpu

    device = flower_gpu.device()
    if device.type == "cuda":
        torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return str(device)


def device() -> str:
    import flower_gpu

    return str(flower_gpu.device())


def wait_for(path: Path, files: int = 0) -> None:
    """Wait until a file is there, or so many files in a folder."""
    deadline = time.monotonic() + _WAIT_S
    while len(list(path.glob("*.there"))) < files if files else not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has not come within {_WAIT_S:g} s")
        time.sleep(0.02)


def _of_driver() -> int | None:
    """Return what the driver says that this process uses, its CUDA context included."""
    from flower_gpu.gpu import inventory

    for gpu in inventory.take().gpus:
        for process in gpu.processes or ():
            if process.pid == os.getpid():
                return process.used_bytes
    return None
