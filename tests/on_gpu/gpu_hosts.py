"""Which kind of host this is, and a model that it can train. Importing this imports no torch."""

from __future__ import annotations

import os
from typing import Any

#: Why a start method is not tried on the stand-in.
SAME = "what is to be seen is the same as with the other start methods"


def is_stand_in() -> bool:
    """Tell whether the cards are those of tests/cuda_stub: kernels do nothing, and there is no cuBLAS."""
    return "NVML_STUB_DIR" in os.environ


def layer(size: int, out: int) -> Any:
    """Return a linear layer; where there is no cuBLAS one that multiplies each input by a weight."""
    import torch
    from torch import nn

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).repeat(1, -(-out // size))[:, :out]

    return Scale() if is_stand_in() else nn.Linear(size, out)
