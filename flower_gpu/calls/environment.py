"""The environment variables of one worker: what it sees of GPUs, and how much its allocators may take."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from flower_gpu import frameworks
from flower_gpu.frameworks.framework import Cap
from flower_gpu.gpu import guard
from flower_gpu.leases.lease import VARIABLE, Lease

_RAYLET = "RAY_RAYLET_PID"  # set by Ray in every worker process of its own
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def of_worker(lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker with this lease, or of one that must see no GPU.

    They are set over ``environ``: a user's own settings of allocators in it stay, a smaller cap too.

    Raises ConfigError if a user's own cap is no number.
    """
    if lease is None:
        return {_VISIBLE: "", VARIABLE: "", **guard.environment(())}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        _VISIBLE: ",".join(share.uuid for share in lease.shares),
        VARIABLE: lease.to_text(),
        **guard.environment(share.device_files for share in lease.shares),
        **frameworks.environment(caps_of(lease), environ),
    }


def caps_of(lease: Lease) -> list[Cap]:
    """Return how much allocators may take of each GPU of a lease."""
    return [Cap(share.cap_bytes, share.total_bytes) for share in lease.shares]


def without_ray(environ: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """Return this process's environment with the GPUs visible that Ray itself was started with.

    Ray hides all GPUs from an actor that asked it for none, and all but some from others. Both are guesses
    about who uses what; leases know. Unchanged outside of Ray's actors, and where Ray cannot be asked.
    """
    raylet = environ.get(_RAYLET, "")
    if not raylet.isdecimal() or int(raylet) != os.getppid():
        return environ
    try:
        with open(f"/proc/{raylet}/environ", "rb") as file:
            text = file.read()
    except OSError:
        return environ
    variables = dict(line.split("=", 1) for line in os.fsdecode(text).split("\0") if "=" in line)
    # Without the second one nobody asks again.
    found = {name: value for name, value in environ.items() if name not in (_VISIBLE, _RAYLET)}
    return found | {name: value for name, value in variables.items() if name == _VISIBLE}
