"""How much GPU a call asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from flower_gpu.printable import format_bytes


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
