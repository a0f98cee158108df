"""Whether a build of PyTorch fits the driver, and which of the two to change."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

_PAGE: Final = "https://pytorch.org/get-started/locally/"

# Within a major version of CUDA newer builds run on older drivers ("CUDA Compatibility", minor version), from
# these drivers on (CUDA release notes, table 2).
_LEAST_DRIVER: Final = MappingProxyType({11: "450.80.02", 12: "525.60.13", 13: "580.65.06"})
# PyTorch's index of wheels with which most drivers of that major version work.
_INDEX: Final = MappingProxyType({11: "cu118", 12: "cu126", 13: "cu130"})


def is_too_new(cuda: str, driver_cuda: tuple[int, int]) -> bool:
    """Return True if a build for ``cuda``, such as ``"13.2"``, is too new for a driver with this CUDA."""
    major = _major(cuda)
    return major is not None and major > driver_cuda[0]


def what_to_change(cuda: str, driver_cuda: tuple[int, int]) -> str:
    """Return the solution for :func:`is_too_new`, with commands."""
    major = _major(cuda)
    least = None if major is None else _LEAST_DRIVER.get(major)
    newer = (
        f"update the driver to {least} or later" if least else f"update the driver to one with CUDA {major}"
    )
    return f"{newer}, or replace torch by a build for CUDA {driver_cuda[0]}: {how_to_install(driver_cuda)}"


def _major(cuda: str) -> int | None:
    """Return the major version; None for a text that is no version, as an app may tell."""
    found = re.match(r"(\d{1,4})(?:\.|$)", cuda, re.ASCII)
    return int(found[1]) if found else None


def how_to_install(driver_cuda: tuple[int, int] | None) -> str:
    """Return the command that installs a PyTorch for a driver with this CUDA."""
    index = _INDEX.get(driver_cuda[0]) if driver_cuda else None
    if index is None:
        return f"see {_PAGE}"
    # Without that option pip takes a torch that is there for what was asked for.
    command = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    return f"`{command}` (see {_PAGE})"


def explained(torch: str, cuda: str | None, driver: str | None, driver_cuda: tuple[int, int] | None) -> str:
    """Return the versions that a call without CUDA met, and which of them to change.

    ``torch``, ``cuda``: PyTorch's version and the CUDA it was built for; None: for the CPU only.
    ``driver``: the driver's version, as ``nvidia-smi`` shows it; None where not known.
    ``driver_cuda``: the newest CUDA that the driver supports, such as ``(12, 4)``.
    """
    has = (
        "CUDA of unknown version"
        if driver_cuda is None
        else f"CUDA {driver_cuda[0]}.{driver_cuda[1]} at most"
    )
    versions = (
        f"PyTorch {torch} is built for {f'CUDA {cuda}' if cuda else 'the CPU only'}, and driver "
        f"{driver or 'of unknown version'} has {has}"
    )
    if cuda is None:
        return f"{versions}: change PyTorch, {how_to_install(driver_cuda)}"
    if driver_cuda is not None and is_too_new(cuda, driver_cuda):
        return f"{versions}: {what_to_change(cuda, driver_cuda)}"
    return f"{versions}: that is not the reason, `flower-gpu doctor` looks for others"
