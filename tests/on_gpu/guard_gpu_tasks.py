"""Tasks that look for GPUs by their device files, and use the one that they have."""

from __future__ import annotations

import os
from pathlib import Path


def opened() -> list[str]:
    """Return which device files of NVIDIA's can be opened here."""
    found = []
    for path in sorted(Path("/dev").glob("nvidia*")):
        try:
            if path.is_char_device():
                os.close(os.open(path, os.O_RDWR))
                found.append(path.name)
        except OSError:
            continue
    return found


def summed_on_the_gpu() -> tuple[list[str], float]:
    """Return the same after a sum on the GPU, and that sum."""
    import torch

    return opened(), float(torch.ones(1000, device="cuda").sum())


def cuda_after_the_variable_was_changed(uuid: str) -> str:
    """Try to use a GPU that was refused, and return the error."""
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    import torch

    try:
        torch.ones(1, device=torch.device("cuda"))
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""
