"""Requests and leases: the ledger grants a lease, and the worker reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flower_gpu.printable import format_bytes

#: Environment variable in which a worker finds its lease.
VARIABLE = "FLOWER_GPU_LEASE"


@dataclass(frozen=True)
class LeaseRequest:
    """How much GPU a call needs; with neither amount as much as its footprint says (auto)."""

    # Up to 1 a share of what one GPU has to lease, the CUDA context included: with 0.25 four calls fit.
    # From 1 on a whole number of GPUs.
    num_gpus: float | None = None
    memory_bytes: int | None = None  # bytes of one GPU, the CUDA context included
    alone: bool = False  # with nobody else on the GPU; where neither is given, all that it has
    written: str = field(default="one GPU (auto)", compare=False)  # by the user: "--gpu-memory 2GiB"

    @property
    def is_auto(self) -> bool:
        """Whether the amount is to be found out."""
        return self.num_gpus is None and self.memory_bytes is None and not self.alone

    @property
    def count(self) -> int:
        """How many GPUs it takes part of: 1 unless ``num_gpus`` is 2 or more."""
        return 1 if self.num_gpus is None or self.num_gpus <= 1 else int(self.num_gpus)

    @property
    def share(self) -> float | None:
        """The share of each GPU's budget, up to 1; None where it asks for bytes, or is auto."""
        return None if self.num_gpus is None else min(self.num_gpus, 1.0)

    def describe(self) -> str:
        """Return it in words."""
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

    uuid: str  # the GPU, or MIG device, as NVML names it
    index: int  # its number, as in ``nvidia-smi``
    name: str  # its model
    total_bytes: int  # memory of the whole GPU
    memory_bytes: int  # memory the lease is for, the CUDA context included
    cap_bytes: int  # what of it an allocator may take: without the context
    device_files: tuple[str, ...] | None = None  # by which it is opened; None where they are not known


@dataclass(frozen=True)
class Lease:
    """The right to shares of one or more GPUs."""

    id: str  # names its ticket in the ledger
    shares: tuple[Share, ...]  # One for each GPU. The first is ``cuda:0`` in the worker.
    alone: bool = False  # whether nobody else gets a lease on these GPUs meanwhile
    ticket: str = ""  # path of its ticket, where the worker tells what it uses
    by_driver: bool = False  # whether the driver caps the worker, in a control group of its own
    compute: float | None = None  # the share of processors that its call asks for; None: as of the memory

    @property
    def processors(self) -> float:
        """The share of each GPU's processors (SMs) that its worker has where MPS is used, up to 1."""
        if self.compute is not None:
            return self.compute
        return 1.0 if self.alone else max(share.memory_bytes / share.total_bytes for share in self.shares)

    def to_text(self) -> str:
        """Return it as the value of :data:`VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Lease | None:
        """Return the lease of a process with these variables; None where it has none."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        shares = tuple(_share(share) for share in fields["shares"])
        return cls(**{**fields, "shares": shares})


def _share(fields: dict[str, Any]) -> Share:
    files = fields.pop("device_files")
    return Share(**fields, device_files=None if files is None else tuple(files))
