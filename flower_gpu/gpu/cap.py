"""The environment that holds a worker to its lease: which GPUs it sees, and how much an allocator may take.

Nothing is imported and nothing asked here: these are pure functions of a lease and an environment.

Sources: "Optimizing memory usage" in PyTorch's CUDA notes and c10/cuda/CUDAAllocatorConfig.cpp;
``generate_pjrt_gpu_plugin_options`` in jaxlib; ``tf.config`` on ``TF_FORCE_GPU_ALLOW_GROWTH``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Final

from flower_gpu.errors import ConfigError
from flower_gpu.gpu import lease as leases
from flower_gpu.gpu.lease import Lease

#: Where PyTorch reads its allocator's settings. Where both are set the old name wins, and as a whole.
SETTINGS: Final = "PYTORCH_ALLOC_CONF"
OLD_SETTINGS: Final = "PYTORCH_CUDA_ALLOC_CONF"

#: The setting that caps what PyTorch's allocator takes of a GPU.
FRACTION: Final = "per_process_memory_fraction"

# An unknown setting makes PyTorch raise an error when CUDA starts. This one came with 2.10 (pytorch#161035).
_FRACTION_SINCE = (2, 10)

#: Where JAX reads its cap, when it first looks for devices. With both set it does not start.
JAX_FRACTIONS: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

_DIGITS = 12  # of a fraction; of a GPU with 200 GB that is less than a byte


def worker_environment(
    lease: Lease, environ: Mapping[str, str], *, torch_knows: bool | None = None
) -> dict[str, str]:
    """Return the variables of a worker that holds ``lease``.

    Parameters
    ----------
    lease : Lease
        What it was granted.
    environ : mapping of str to str
        The worker's variables without these. A user's own settings of allocators stay, a smaller cap too.
    torch_knows : bool, optional
        Whether the worker's PyTorch takes its cap from the environment. Default: what is installed tells.
        Where it does not, :mod:`flower_gpu.pytorch.memory` sets the cap when CUDA starts.

    Returns
    -------
    dict of str to str
        To be set over ``environ``.

    Raises
    ------
    ConfigError
        If a user's own cap is no number.
    """
    cap = cap_fraction(lease)
    variables = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(share.uuid for share in lease.shares),
        leases.VARIABLE: lease.to_text(),
        # In a client it keeps is_available() from starting CUDA; a worker must know whether CUDA works.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **_jax_fraction(cap, environ),
    }
    if torch_installed_knows() if torch_knows is None else torch_knows:
        merged = torch_settings(cap, environ)
        variables[SETTINGS] = merged
        if OLD_SETTINGS in environ:  # it would win; PyTorch does not mind both when they say the same
            variables[OLD_SETTINGS] = merged
    return variables


def hidden_environment() -> dict[str, str]:
    """Return the variables of a worker that must not see any GPU."""
    return {"CUDA_VISIBLE_DEVICES": "", leases.VARIABLE: ""}


def cap_fraction(lease: Lease) -> str:
    """Return the part of a GPU that an allocator may take, never more than the lease says.

    Allocators have one number for all GPUs that a process sees: of several it is the smallest part. Where
    PyTorch is told when CUDA starts, each GPU gets its own.
    """
    # NVML's total is a little more than what CUDA shows, so this is on the safe side.
    return min((_down(share.cap_bytes, share.total_bytes) for share in lease.shares), default=_down(1, 1))


def torch_settings(cap: str, environ: Mapping[str, str]) -> str:
    """Return a user's settings of PyTorch's allocator with the cap in them.

    Parameters
    ----------
    cap : str
        As from :func:`cap_fraction`.
    environ : mapping of str to str
        Where the user's settings are.

    Raises
    ------
    ConfigError
        If the user's own cap is no number from 0 to 1.
    """
    name = OLD_SETTINGS if OLD_SETTINGS in environ else SETTINGS
    text = environ.get(name, "")
    entries = [entry for entry in _entries(text) if entry.strip()]
    if any(_pair(entry) == ("backend", "cudaMallocAsync") for entry in entries):
        # It ignores the cap of its settings, and warns; it has the one that is set when CUDA starts.
        return text
    own = [value for key, value in map(_pair, entries) if key == FRACTION]
    others = [entry.strip() for entry in entries if _pair(entry)[0] != FRACTION]
    return ",".join([*others, f"{FRACTION}:{_smaller(cap, own[-1] if own else None, name)}"])


def own_fraction(cap: str, environ: Mapping[str, str]) -> float | None:
    """Return the cap for PyTorch that a user has set to less than ``cap``; None where nobody has."""
    text = environ.get(OLD_SETTINGS, environ.get(SETTINGS, ""))
    found = [value for key, value in map(_pair, _entries(text)) if key == FRACTION]
    return float(found[-1]) if found and float(found[-1]) < float(cap) else None


@cache
def torch_installed_knows() -> bool:
    """Tell whether the PyTorch that is installed takes its cap from the environment."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return torch_version_knows(version)


def torch_version_knows(version: str) -> bool:
    """Tell whether this version of PyTorch takes its cap from the environment."""
    found = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(a|b|rc|\.?dev)?", version)
    if not found:
        return False
    number = int(found[1]), int(found[2])
    # A pre-release of that very version may be older than the setting.
    return number > _FRACTION_SINCE or (number == _FRACTION_SINCE and not found[3])


def _jax_fraction(cap: str, environ: Mapping[str, str]) -> dict[str, str]:
    # All versions take the old name so far (up to 0.10.2).
    names = [name for name in JAX_FRACTIONS if environ.get(name)] or [JAX_FRACTIONS[1]]
    return {name: _smaller(cap, environ.get(name) or None, name, most=math.inf) for name in names}


def _smaller(cap: str, own: str | None, name: str, most: float = 1.0) -> str:
    if own is None:
        return cap
    try:
        value = float(own)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ConfigError(f"{name}: the memory fraction must be a number from 0 to 1, not {own!r}")
    return own if value < float(cap) else cap


def _down(part: int, whole: int) -> str:
    """Return ``part / whole`` as a decimal number, rounded down; at most 1."""
    units = 10**_DIGITS
    parts = min(units, max(0, part) * units // whole) if whole > 0 else 0
    return f"{parts // units}.{parts % units:0{_DIGITS}d}"


def _pair(entry: str) -> tuple[str, str]:
    key, _, value = entry.partition(":")
    return key.strip(), value.strip()


def _entries(text: str) -> list[str]:
    """Split settings at the commas that are not inside of brackets."""
    return re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text)
