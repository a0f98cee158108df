"""What a worker was granted: shares of GPUs. Made by the ledger, read by the worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Environment variable in which a worker finds its lease.
VARIABLE = "FLOWER_GPU_LEASE"


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
        return cls(fields["id"], shares, fields["alone"], fields["ticket"])


def _share(fields: dict[str, Any]) -> Share:
    files = fields.pop("device_files")
    return Share(**fields, device_files=None if files is None else tuple(files))
