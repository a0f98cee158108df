"""The task of the trial: what a call of a client does on its GPU, in a worker as a call gets it."""

from __future__ import annotations

import os
from typing import Final

from flower_gpu.gpu import inventory
from flower_gpu.leases.lease import Lease
from flower_gpu.printable import format_bytes

#: What the trial needs of a GPU beyond CUDA's context.
BYTES: Final = 256 << 20

_ABOVE_CAP: Final = 16 << 20
_SIDE: Final = 256  # of the matrices that are multiplied


def run() -> list[tuple[str, str]]:
    """Take a little memory, ask for more than the cap, compute; return levels and texts of what came of it.

    The level ``unmeasured`` has the text of a note on what the driver does not tell.
    """
    lease = Lease.from_environment(os.environ)
    if lease is None or not lease.shares:
        return [("problem", "got no lease: calls run on the CPU")]
    share = lease.shares[0]
    gpu = f"GPU {share.index} ({share.name})"
    lease_of, cap = format_bytes(share.memory_bytes), format_bytes(share.cap_bytes)
    told: list[tuple[str, str]] = []
    try:
        import torch

        step = "does not start CUDA"
        torch.ones(1 << 16, device="cuda").cpu()
        told.append(("ok", f"has a lease of {lease_of} on {gpu}, of which PyTorch may take {cap}"))
        listed = [one for found in inventory.take_of([share.uuid]) for one in found.processes or ()]
        if not any(one.pid == os.getpid() and one.used_bytes for one in listed):
            told.append(("unmeasured", "used an amount of memory that the driver does not tell"))
        step = "fails when it asks for more than its cap"
        told.append(_above_cap(share.cap_bytes))
        step = "cannot compute"
        numbers = torch.ones(_SIDE, _SIDE, device="cuda")
        is_right = (numbers @ numbers).sum().item() == _SIDE**3
        told.append(
            (
                "ok" if is_right else "problem",
                f"computed on {gpu}, with a {'right' if is_right else 'wrong'} result",
            )
        )
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        told.append(("problem", f"{step} on {gpu}: {type(error).__name__}: {text}"))
    return told


def _above_cap(cap_bytes: int) -> tuple[str, str]:
    import torch

    try:
        torch.empty(cap_bytes + _ABOVE_CAP, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        if torch.cuda.max_memory_reserved() <= cap_bytes:
            return "ok", "is refused more than that by PyTorch, with its OutOfMemoryError"
    return "problem", "was given more than its cap"
