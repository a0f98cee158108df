"""A module that chooses its device when it is imported, as most apps do."""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = torch.cuda.device_count()
ACCELERATOR = torch.accelerator.is_available()


def load(**_: str) -> None:
    """Load nothing: importing this module is enough. Other arguments get another fork server."""


def seen() -> dict[str, Any]:
    """Return what this module saw when it was imported, and what this process sees now."""
    return {
        "at_import": (DEVICE, COUNT, ACCELERATOR),
        "is_bad_fork": torch.cuda._is_in_bad_fork(),  # type: ignore[no-untyped-call]
        "is_available": torch.cuda.is_available(),
        "parent": os.getppid(),
    }
