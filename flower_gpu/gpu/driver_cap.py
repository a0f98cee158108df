"""Caps that NVIDIA's driver keeps: a worker in a control group of its own can have so much of each GPU.

Whatever code asks for more gets CUDA's ordinary error of missing memory. It needs driver 615, control groups
of version 2 and a right that root has. The group of a worker is made and joined by the worker itself
(:func:`join`); whoever comes later removes those of dead workers (:func:`remove_left`), so that a kill at any
moment leaves nothing that stays.

Sources: "MPS v3 Memory Partitioning" (https://docs.nvidia.com/deploy/mps/latest/mpsv3-memory-partitioning.html),
nvmlDeviceSetMemoryLimits_v1 in NVML's reference.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from flower_gpu import control_group
from flower_gpu.errors import GPUUnavailableError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.nvml import QueryError
from flower_gpu.options import GPU_CAP

_NAME: Final = "flower-gpu-"  # how names of such groups begin
_TRIAL_BYTES: Final = 64 << 20
_CONTROLLER: Final = "dmem"  # by which kernels from 6.14 on keep the cap; before, the driver does
_LIMITS: Final = ("memory.max", "memory.high", "cpu.max", "pids.max")


class _UnavailableError(Exception):
    """There can be no such cap here; the text has the reason."""


def is_used(uuids: tuple[str, ...], environ: Mapping[str, str]) -> bool:
    """Tell whether the driver caps workers with a lease of these GPUs.

    Raises GPUUnavailableError if it has to, and cannot.
    """
    wanted = GPU_CAP.resolve(None, environ)
    if wanted == "allocator":
        return False
    reason = problem(uuids)
    if reason and wanted == "driver":
        raise required(reason)
    return not reason


def required(reason: str) -> GPUUnavailableError:
    """Return the error of a call that must not run without the driver's cap."""
    return GPUUnavailableError(
        f"--gpu-cap driver ({GPU_CAP.variable}): the driver cannot cap this worker: {reason}. Use another "
        "host, or --gpu-cap auto, which leaves the cap to the frameworks' allocators here"
    )


@cache  # a group is made, limited and removed
def problem(uuids: tuple[str, ...]) -> str | None:
    """Return why the driver cannot cap workers of this process on these GPUs; None where it can."""
    if any(uuid.startswith("MIG-") for uuid in uuids):
        return "a MIG device has no such cap"
    try:
        groups = control_group.unified() or [Path("/")]
        if not inventory.limits(groups[0], uuids):
            return "a driver before 615 knows no limits of control groups"
        parent = _parent()
        _places.add(parent)
        remove_left()
        group, lock = _made(parent)
        try:
            _limit(group, dict.fromkeys(uuids, _TRIAL_BYTES))
        finally:
            _remove(group, uuids)
            os.close(lock)
    except (_UnavailableError, OSError, QueryError) as error:
        return str(error)
    return None


def describe(uuids: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return a line on who caps workers."""
    if GPU_CAP.resolve(None, environ) == "allocator":
        return "GPU cap: by the frameworks' allocators"
    if reason := problem(uuids):
        return f"GPU cap: by the frameworks' allocators (not by the driver: {reason})"
    return "GPU cap: by the driver, for any code"


class _OwnGroup:
    """The group that this worker has made and joined, with its lock; None: it has not, or is no worker."""

    group: Path | None = None
    lock = -1
    limits: Mapping[str, int] | None = None  # the last ones


_OWN_GROUP: Final = _OwnGroup()

# The groups of this process's workers: where they are, and which GPUs each has limits of.
_places: set[Path] = set()
_uuids_of: dict[Path, tuple[str, ...]] = {}


def join(limits: Mapping[str, int]) -> Path:
    """Cap this worker and its children by the driver, and return the worker's control group.

    A worker that another worker has started stays in that worker's group, because both have one lease. No
    thread is left that was not there before.

    ``limits``: bytes by UUID.
    Raises GPUUnavailableError if the driver cannot cap the worker.
    """
    try:
        group = _own()
        if group == _OWN_GROUP.group:
            if limits != _OWN_GROUP.limits:  # else it has another call of the same lease
                _limit(group, limits)
        elif not group.name.startswith(_NAME):
            group, _OWN_GROUP.lock = _made(_parent())
            _limit(group, limits)
            (group / "cgroup.procs").write_text(str(os.getpid()))
            _OWN_GROUP.group = group
            # The GPU guard and the confinement come next. Landlock restricts the calling thread only, so the
            # thread that has asked NVML must be gone. The task may start NVML again.
            inventory.close()
        _OWN_GROUP.limits = limits
    except (_UnavailableError, OSError, QueryError) as error:
        raise GPUUnavailableError(
            f"the driver's cap could not be set for this worker: {error}. Try again, or do without it: "
            f"--gpu-cap allocator ({GPU_CAP.variable})"
        ) from error
    return group


def worker_is_in(group: Path, uuids: tuple[str, ...]) -> None:
    """Take note of the group of a worker of this process, which has a lease of these GPUs."""
    groups = control_group.unified()
    if groups and group.is_relative_to(groups[-1]) and ".." not in group.parts:  # an app may say anything
        _places.add(group.parent)
        _uuids_of[group] = uuids


def used_bytes(uuids: Sequence[str]) -> dict[str, int]:
    """Return what this worker's group uses, whatever code and process took it, by UUID."""
    with suppress(_UnavailableError, QueryError):
        return {uuid: used for uuid, (_, _, used) in inventory.limits(_own(), uuids).items()}
    return {}


def remove_left() -> None:
    """Remove the groups of dead workers, of other processes too, and the memory that they still reserve."""
    places = tuple(_places)  # a copy, made in one step, because other threads add places meanwhile
    for group in [group for place in places for group in place.glob(f"{_NAME}*")]:
        with suppress(OSError):  # it is gone, or its worker is there
            lock = _locked(group)
            try:
                uuids = _uuids_of.pop(group, None)
                _remove(group, uuids or [gpu.uuid for gpu in inventory.take(processes=False).usable])
            finally:
                os.close(lock)


def _own() -> Path:
    groups = control_group.unified()
    if not groups:
        raise _UnavailableError("this host has no control groups of version 2")
    return groups[0]


def _parent() -> Path:
    """Return the group in which those of workers can be: this process's own, else the one above."""
    own, *above = control_group.unified()[:2] or [_own()]
    controllers = own / "cgroup.controllers"
    if not controllers.exists() or _CONTROLLER not in controllers.read_text().split():
        return own
    # A group with processes cannot hand the controller on ("No Internal Process Constraint" in the kernel's
    # documentation). Beside it workers would have none of its limits.
    places = [own, *(group for group in above if not any(map(_is_limited, (own / name for name in _LIMITS))))]
    for place in places:
        with suppress(OSError):
            (place / "cgroup.subtree_control").write_text(f"+{_CONTROLLER}")
            return place
    raise _UnavailableError(
        f"its control group {own} cannot hand on the controller {_CONTROLLER}, as it has processes: start it "
        "in a group that is delegated (systemd: Delegate=yes, DelegateSubgroup=)"
    )


def _is_limited(file: Path) -> bool:
    return file.exists() and file.read_text().split()[0] != "max"


def _made(parent: Path) -> tuple[Path, int]:
    """Make a group; returns it with its lock, which tells all others that this process lives."""
    while True:
        group = parent / f"{_NAME}{os.getpid()}-{os.urandom(4).hex()}"
        group.mkdir()
        with suppress(FileNotFoundError, BlockingIOError):  # somebody took it for a left one
            return group, _locked(group)


def _locked(group: Path) -> int:
    """Lock a group, for as long as this process has the descriptor; OSError where another one has it."""
    lock = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        group.stat()
    except OSError:
        os.close(lock)
        raise
    return lock


def _limit(group: Path, limits: Mapping[str, int]) -> None:
    # Both limits: what is above the soft one may be taken away again.
    inventory.set_limits(group, limits)
    told = inventory.limits(group, limits)
    if any(told.get(uuid, (None,) * 3)[1] is None for uuid in limits):
        raise _UnavailableError("the driver takes the limit and does not keep it")


def _remove(group: Path, uuids: Iterable[str]) -> None:
    with suppress(QueryError):  # or the groups above keep what it has reserved
        inventory.set_limits(group, dict.fromkeys(uuids))
    with suppress(OSError):  # it has a process that the worker has left
        group.rmdir()
