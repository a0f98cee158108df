"""GPU memory limits enforced by NVIDIA's driver: each worker has a control group with a limit for each GPU.

Any code that allocates more gets CUDA's ordinary out-of-memory error. The limits need driver 615, control
groups of version 2 and root's permission to set them. The worker itself creates and joins its group
(:func:`join`). Other processes remove the groups of dead workers (:func:`remove_stale`), so the groups of
killed workers disappear soon.

Sources: "MPS v3 Memory Partitioning"
(https://docs.nvidia.com/deploy/mps/latest/mpsv3-memory-partitioning.html), nvmlDeviceSetMemoryLimits_v1 in
NVML's reference.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from flower_gpu import control_group
from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.errors import GPUUnavailableError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import QueryError
from flower_gpu.leases.lease import Lease
from flower_gpu.options import GPU_CAP
from flower_gpu.workers import events, own_process

_PREFIX: Final = "flower-gpu-"  # of the names of our groups
_TRIAL_BYTES: Final = 64 << 20
# The controller that enforces the limit in Linux 6.14 and later. With older kernels the driver enforces it.
_CONTROLLER: Final = "dmem"
_LIMITS: Final = ("memory.max", "memory.high", "cpu.max", "pids.max")


class _UnavailableError(Exception):
    """The driver cannot set limits here. The text gives the reason."""


class DriverCap(Grant):
    """The driver's limit on the memory of a worker. ``Lease.by_driver`` is True if it is set."""

    def adjust(self, lease: Lease, terms: Terms) -> Lease:
        """Let the driver cap the worker if it can, unless the user has chosen the allocators only.

        Raises GPUUnavailableError if the driver's cap is required and not available.
        """
        from flower_gpu.calls import notices

        wanted = GPU_CAP.resolve(None, os.environ)
        reason: str | None = "this call has no worker of its own"
        if terms.method.is_own_process:
            notices.say_once(describe(_uuids(lease), os.environ), logging.INFO)
            reason = "" if wanted == "allocator" else problem(_uuids(lease))
        if reason and wanted == "driver":
            raise GPUUnavailableError(
                f"--gpu-cap driver ({GPU_CAP.variable}): the driver cannot cap this worker: {reason}. Use "
                "another host, or --gpu-cap auto, which leaves the cap to the frameworks' allocators here"
            )
        return replace(lease, by_driver=wanted != "allocator" and not reason)

    def describe(self, terms: Terms, env: Mapping[str, str]) -> dict[str, Any]:
        """Return who caps the worker."""
        if terms.own_gpu_lease is None:
            return {}
        return {"cap": "driver" if terms.own_gpu_lease.by_driver else "allocator"}

    def in_worker(self, lease: Lease | None) -> None:
        """Put this worker into its control group, for ever."""
        if lease is not None and lease.by_driver and not own_process.is_inside():
            group = join({share.uuid: share.memory_bytes for share in lease.shares})
            events.send("driver_cap", group=str(group))

    def on_event(self, event: Mapping[str, Any], lease: Lease | None, record: dict[str, Any]) -> bool:
        """Register the control group of a worker, so that it is removed after the worker."""
        if event.get("event") != "driver_cap":
            return False
        register(Path(event["group"]), () if lease is None else _uuids(lease))
        return True


def _uuids(lease: Lease) -> tuple[str, ...]:
    return tuple(share.uuid for share in lease.shares)


@cache  # the check creates a group, sets a limit and removes the group
def problem(uuids: tuple[str, ...]) -> str | None:
    """Return why the driver cannot cap workers of this process on these GPUs, or None if it can."""
    if any(uuid.startswith("MIG-") for uuid in uuids):
        return "a MIG device has no such cap"
    try:
        groups = control_group.unified() or [Path("/")]
        if not inventory.limits(groups[0], uuids):
            return "drivers before 615 do not support limits of control groups"
        parent = _parent()
        _parents.add(parent)
        remove_stale()
        group, lock = _create(parent)
        try:
            _limit(group, dict.fromkeys(uuids, _TRIAL_BYTES))
        finally:
            _remove(group, uuids)
            os.close(lock)
    except (_UnavailableError, OSError, QueryError) as error:
        return str(error)
    return None


def describe(uuids: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return a line that says who caps the memory of workers."""
    if GPU_CAP.resolve(None, environ) == "allocator":
        return "GPU cap: by the frameworks' allocators"
    if reason := problem(uuids):
        return f"GPU cap: by the frameworks' allocators (not by the driver: {reason})"
    return "GPU cap: by the driver, for any code"


class _OwnGroup:
    """The group that this worker has created and joined, with its lock. ``group`` is None without one."""

    group: Path | None = None
    lock = -1
    limits: Mapping[str, int] | None = None  # the limits set last


_OWN_GROUP: Final = _OwnGroup()

# The parents of the groups of this process's workers, and the GPUs with a limit by group
_parents: set[Path] = set()
_uuids_by_group: dict[Path, tuple[str, ...]] = {}


def join(limits: Mapping[str, int]) -> Path:
    """Let the driver cap this worker and its children. Return the worker's control group.

    A worker started by another worker stays in that worker's group, because both have one lease. The function
    leaves no new thread behind.

    ``limits``: bytes by UUID.
    Raises GPUUnavailableError if the driver cannot cap the worker.
    """
    try:
        group = _own_group()
        if group == _OWN_GROUP.group:
            if limits != _OWN_GROUP.limits:  # unchanged for another call with the same lease
                _limit(group, limits)
        elif not group.name.startswith(_PREFIX):
            group, _OWN_GROUP.lock = _create(_parent())
            _limit(group, limits)
            (group / "cgroup.procs").write_text(str(os.getpid()))
            _OWN_GROUP.group = group
            # The GPU guard and the confinement come next. Landlock restricts the calling thread only, so the
            # NVML thread must end first. The task may start NVML again.
            inventory.close()
        _OWN_GROUP.limits = limits
    except (_UnavailableError, OSError, QueryError) as error:
        raise GPUUnavailableError(
            f"the driver's cap could not be set for this worker: {error}. Try again, or do without it: "
            f"--gpu-cap allocator ({GPU_CAP.variable})"
        ) from error
    return group


def register(group: Path, uuids: tuple[str, ...]) -> None:
    """Register the group of a worker of this process with a lease on these GPUs, for :func:`remove_stale`."""
    groups = control_group.unified()
    # The path comes from the worker, so it may be anything.
    if groups and group.is_relative_to(groups[-1]) and ".." not in group.parts:
        _parents.add(group.parent)
        _uuids_by_group[group] = uuids


def used_bytes(uuids: Sequence[str]) -> dict[str, int]:
    """Return the memory used by all processes in this worker's group, by UUID."""
    with suppress(_UnavailableError, QueryError):
        return {uuid: used for uuid, (_, _, used) in inventory.limits(_own_group(), uuids).items()}
    return {}


def remove_stale() -> None:
    """Remove the groups of all dead workers, also of other processes, and the memory reserved by them."""
    parents = tuple(_parents)  # an atomic copy, because other threads add parents at the same time
    for group in [group for parent in parents for group in parent.glob(f"{_PREFIX}*")]:
        with suppress(OSError):  # removed meanwhile, or locked by a living worker
            lock = _lock(group)
            try:
                uuids = _uuids_by_group.pop(group, None)
                _remove(group, uuids or [gpu.uuid for gpu in inventory.take(processes=False).usable])
            finally:
                os.close(lock)


def _own_group() -> Path:
    groups = control_group.unified()
    if not groups:
        raise _UnavailableError("this host has no control groups of version 2")
    return groups[0]


def _parent() -> Path:
    """Return a parent for the groups of workers: this process's own group, or the group above it."""
    own_group, *above = control_group.unified()[:2] or [_own_group()]
    controllers = own_group / "cgroup.controllers"
    if not controllers.exists() or _CONTROLLER not in controllers.read_text().split():
        return own_group
    # A group with processes cannot enable a controller for its children ("No Internal Process Constraint" in
    # the kernel's documentation). The group above can, but there workers would escape the limits of this
    # group.
    parents = [
        own_group,
        *(group for group in above if not any(map(_is_limited, (own_group / name for name in _LIMITS)))),
    ]
    for parent in parents:
        with suppress(OSError):
            (parent / "cgroup.subtree_control").write_text(f"+{_CONTROLLER}")
            return parent
    raise _UnavailableError(
        f"its control group {own_group} cannot enable the controller {_CONTROLLER} for children, because "
        "it has processes: start it in a delegated group (systemd: Delegate=yes, DelegateSubgroup=)"
    )


def _is_limited(file: Path) -> bool:
    return file.exists() and file.read_text().split()[0] != "max"


def _create(parent: Path) -> tuple[Path, int]:
    """Create a group. Return it with its lock, which shows other processes that this one lives."""
    while True:
        group = parent / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        group.mkdir()
        # Another process may take a new group without a lock for a stale one, and remove it.
        with suppress(FileNotFoundError, BlockingIOError):
            return group, _lock(group)


def _lock(group: Path) -> int:
    """Lock a group until the returned descriptor is closed. Raises OSError if it is taken."""
    lock = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        group.stat()
    except OSError:
        os.close(lock)
        raise
    return lock


def _limit(group: Path, limits: Mapping[str, int]) -> None:
    # Sets the soft and the hard limit, because the driver may reclaim memory above the soft limit.
    inventory.set_limits(group, limits)
    present = inventory.limits(group, limits)
    if any(present.get(uuid, (None,) * 3)[1] is None for uuid in limits):
        raise _UnavailableError("the driver accepts the limit but does not enforce it")


def _remove(group: Path, uuids: Iterable[str]) -> None:
    # Without this, the memory stays reserved in the groups above.
    with suppress(QueryError):
        inventory.set_limits(group, dict.fromkeys(uuids))
    with suppress(OSError):  # a process of the worker is still in the group
        group.rmdir()
