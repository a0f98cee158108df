"""A module that chooses its device when it is imported, as most apps do."""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = torch.cuda.device_count()
ACCELERATOR = torch.accelerator.is_available()


def load(**_: str) -> None:
    """Load nothing: the module is there. Other arguments are for other fork servers."""


def seen() -> dict[str, Any]:
    """Return what the module has found, and what this process itself would."""
    return {
        "found": (DEVICE, COUNT, ACCELERATOR),
        "is_bad_fork": torch.cuda._is_in_bad_fork(),  # type: ignore[no-untyped-call]
        "is_available": torch.cuda.is_available(),
        "parent": os.getppid(),
    }
