"""The task of the trial: what a call of a client does on its GPU, in a worker as a call gets it.

Each step tells for itself, so that one that fails hides none of the others.
"""

from __future__ import annotations

import os
from typing import Any, Final

from flower_gpu.gpu import inventory
from flower_gpu.leases.lease import Lease, Share

#: What the trial needs of a GPU beyond CUDA's context.
BYTES: Final = 256 << 20

_ABOVE_CAP: Final = 16 << 20
_SIDE: Final = 256  # of the matrices that are multiplied


def run() -> dict[str, Any]:
    """Take a little memory, ask for more than the cap, compute; return what came of each."""
    lease = Lease.from_environment(os.environ)
    if lease is None or not lease.shares:
        return {"has_lease": False}
    share = lease.shares[0]
    told = {"has_lease": True, "index": share.index, "uuid": share.uuid, "name": share.name}
    told |= {"lease_bytes": share.memory_bytes, "cap_bytes": share.cap_bytes}
    for step in (_start, _above_cap, _compute):
        try:
            told |= step(share)
        except Exception as error:
            return told | {"failed": step.__name__.strip("_"), "error": f"{type(error).__name__}: {error}"}
    return told


def _start(share: Share) -> dict[str, Any]:
    import torch

    sent = torch.arange(1 << 16)
    came_back = sent.to("cuda").cpu()
    if not torch.equal(sent, came_back):
        raise ValueError("what was copied to the GPU came back as something else")
    listed = [one for gpu in inventory.take_of([share.uuid]) for one in gpu.processes or ()]
    return {"is_measured": any(one.pid == os.getpid() and one.used_bytes for one in listed)}


def _above_cap(share: Share) -> dict[str, Any]:
    import torch

    try:
        torch.empty(share.cap_bytes + _ABOVE_CAP, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        taken = torch.cuda.max_memory_reserved()
        return {"above_cap": "refused" if taken <= share.cap_bytes else f"{taken} bytes were taken"}
    return {"above_cap": "it was given"}


def _compute(share: Share) -> dict[str, Any]:
    import torch

    numbers = torch.ones(_SIDE, _SIDE, device="cuda")
    total = (numbers @ numbers).sum().item()
    return {"is_right": total == _SIDE**3}
