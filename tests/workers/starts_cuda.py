"""A module that starts CUDA when it is imported (a stub of the driver)."""

from __future__ import annotations

import ctypes
import os

if "DRIVER" in os.environ:
    ctypes.CDLL(os.environ["DRIVER"]).cuInit(1)


def load() -> None:
    """Load nothing: the module is there."""
