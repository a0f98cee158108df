"""Lease requests and leases. The ledger grants a lease, and the worker reads it from its environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flower_gpu.printable import format_bytes

#: Environment variable with the lease of a worker.
VARIABLE = "FLOWER_GPU_LEASE"


@dataclass(frozen=True)
class LeaseRequest:
    """The amount of GPU that a call requests.

    Without ``num_gpus`` and ``memory_bytes``, the footprint of the task decides (auto).
    """

    # Below 1: fraction of one GPU's memory for leases, including the CUDA context. Four calls with 0.25 fit.
    # From 1 on: number of whole GPUs.
    num_gpus: float | None = None
    memory_bytes: int | None = None  # bytes of one GPU, including the CUDA context
    # No other lease on the GPU. Without an amount, the lease gets all its memory
    alone: bool = False
    # The request as the user wrote it, such as "--gpu-memory 2GiB"
    written: str = field(default="one GPU (auto)", compare=False)

    @property
    def is_auto(self) -> bool:
        """True if the footprint of the task decides the amount."""
        return self.num_gpus is None and self.memory_bytes is None and not self.alone

    @property
    def count(self) -> int:
        """Number of GPUs: 1 unless ``num_gpus`` is 2 or more."""
        return 1 if self.num_gpus is None or self.num_gpus <= 1 else int(self.num_gpus)

    @property
    def share(self) -> float | None:
        """Fraction of each GPU's budget, up to 1. None if the request is in bytes or auto."""
        return None if self.num_gpus is None else min(self.num_gpus, 1.0)

    def describe(self) -> str:
        """Return the request in words."""
        if self.memory_bytes is not None:
            return f"{format_bytes(self.memory_bytes)} of one GPU"
        if self.num_gpus is None:
            return "one GPU, as much of it as is needed (auto)"
        if self.num_gpus < 1:
            return f"{self.num_gpus:.3g} of one GPU"
        return "1 GPU" if self.count == 1 else f"{self.count} GPUs"


@dataclass(frozen=True)
class Share:
    """A share of one GPU."""

    uuid: str  # UUID of the GPU or MIG device, from NVML
    index: int  # index of the GPU, as in ``nvidia-smi``
    name: str  # model of the GPU
    total_bytes: int  # memory of the whole GPU
    memory_bytes: int  # leased memory, including the CUDA context
    cap_bytes: int  # limit of the framework's allocator: the leased memory without the context
    device_files: tuple[str, ...] | None = None  # paths below /dev of the GPU, or None if unknown


@dataclass(frozen=True)
class Lease:
    """The right to shares of one or more GPUs."""

    id: str  # id of the ticket in the ledger
    shares: tuple[Share, ...]  # one for each GPU; the first is ``cuda:0`` in the worker
    alone: bool = False  # no other lease may be on these GPUs at the same time
    ticket: str = ""  # path of the ticket, for the reports of the worker
    by_driver: bool = False  # the driver caps the worker, in a control group of its own
    # Requested fraction of each GPU's processors (SMs), up to 1; None for the same fraction as of the memory
    compute: float | None = None

    def to_text(self) -> str:
        """Return the lease as a value of :data:`VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Lease | None:
        """Return the lease of a process with these environment variables, or None."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        shares = tuple(_share(share) for share in fields["shares"])
        return cls(**{**fields, "shares": shares})


def _share(fields: dict[str, Any]) -> Share:
    files = fields.pop("device_files")
    return Share(**fields, device_files=None if files is None else tuple(files))
