"""Whether a build of PyTorch fits the driver, and which of the two to change."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

_PAGE: Final = "https://pytorch.org/get-started/locally/"

# The oldest driver for each major version of CUDA (CUDA release notes, table 2). Within a major version,
# newer builds run on older drivers ("CUDA Compatibility", minor version).
_OLDEST_DRIVER: Final = MappingProxyType({11: "450.80.02", 12: "525.60.13", 13: "580.65.06"})
# For each major version of CUDA, PyTorch's index of wheels that run on most drivers of that version.
_INDEX: Final = MappingProxyType({11: "cu118", 12: "cu126", 13: "cu130"})


def is_too_new(cuda: str, driver_cuda: tuple[int, int]) -> bool:
    """Return True if a build for ``cuda``, such as ``"13.2"``, is too new for a driver with this CUDA."""
    major = _major(cuda)
    return major is not None and major > driver_cuda[0]


def what_to_change(cuda: str, driver_cuda: tuple[int, int]) -> str:
    """Return what to do if :func:`is_too_new` is True, with commands."""
    major = _major(cuda)
    oldest = None if major is None else _OLDEST_DRIVER.get(major)
    newer = (
        f"update the driver to {oldest} or later" if oldest else f"update the driver to one with CUDA {major}"
    )
    return f"{newer}, or replace torch by a build for CUDA {driver_cuda[0]}: {how_to_install(driver_cuda)}"


def _major(cuda: str) -> int | None:
    """Return the major version, or None if the text is not a version. The text comes from a worker."""
    match = re.match(r"(\d{1,4})(?:\.|$)", cuda, re.ASCII)
    return int(match[1]) if match else None


def how_to_install(driver_cuda: tuple[int, int] | None) -> str:
    """Return the command that installs a PyTorch for a driver with this CUDA."""
    index = _INDEX.get(driver_cuda[0]) if driver_cuda else None
    if index is None:
        return f"see {_PAGE}"
    # Without --force-reinstall, pip keeps an installed torch of the same version.
    command = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    return f"`{command}` (see {_PAGE})"


def explained(torch: str, cuda: str | None, driver: str | None, driver_cuda: tuple[int, int] | None) -> str:
    """Return the versions in a worker without CUDA, and which of them to change.

    ``torch``: version of PyTorch.
    ``cuda``: version of CUDA that PyTorch was built for, or None for a CPU build.
    ``driver``: version of the driver, as ``nvidia-smi`` shows it, or None if unknown.
    ``driver_cuda``: newest CUDA that the driver supports, such as ``(12, 4)``.
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
