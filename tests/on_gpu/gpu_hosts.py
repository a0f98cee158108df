"""Detects the stand-in for CUDA, and builds models that can be trained on it. Imports no torch."""

from __future__ import annotations

import os
from typing import Any

#: Reason for skipping a start method on the stand-in.
SAME = "what is to be seen is the same as with the other start methods"


def is_stand_in() -> bool:
    """Return True on the GPUs of tests/cuda_stub, where kernels do nothing and cuBLAS is missing."""
    return "NVML_STUB_DIR" in os.environ


def layer(size: int, out: int) -> Any:
    """Return a linear layer. Without cuBLAS, return a layer that multiplies each input by a weight."""
    import torch
    from torch import nn

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).repeat(1, -(-out // size))[:, :out]

    return Scale() if is_stand_in() else nn.Linear(size, out)
