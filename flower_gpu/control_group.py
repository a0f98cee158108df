"""Cores and memory of this host, and the limits of this process's control groups (Linux, versions 1 and 2).

Processes that share a host must agree on these numbers, so all of them use these functions. A process is
subject to the limits of its own group and of all groups above it. Often only a group above has a limit, for
example the group of a container.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PROC = Path("/proc/self")
_MEMORY = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")
_CPUS = Path("/sys/devices/system/cpu")
# Fields of memory.stat with memory that the kernel reclaims from a group before it kills a process: the page
# cache and the kernel's own caches. Shared memory (tmpfs) is not among them, because the kernel counts it as
# anonymous memory. In version 1, only the fields with "total_" include the groups below.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")


def processors() -> int:
    """Return the number of online processors of the host."""
    # Not os.cpu_count(), which PYTHON_CPU_COUNT overrides.
    return max(1, os.sysconf("SC_NPROCESSORS_ONLN"))


@cache
def all_cores() -> int:
    """Return the number of cores of the host."""
    try:
        numbers: list[int] = []
        for text in (_CPUS / "online").read_text().strip().split(","):
            first, _, last = text.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except (OSError, ValueError):
        return processors()
    return cores_of(frozenset(numbers))


@cache
def cores_of(cpus: frozenset[int]) -> int:
    """Return the number of physical cores that these processors belong to.

    The processors are hardware threads, and all threads of a core count once. PyTorch counts the same way
    when it chooses its number of threads.
    """
    siblings = "cpu{}/topology/thread_siblings_list"
    try:
        return len({(_CPUS / siblings.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        return len(cpus)


def host_memory() -> tuple[int, int]:
    """Return the available and the total main memory of the host in bytes."""
    sizes = {}
    with suppress(OSError, ValueError), _MEMORY.open("rb") as file:  # OSError: not Linux
        for line in file:
            name, _, text = line.partition(b":")
            if name in (b"MemTotal", b"MemAvailable"):
                sizes[name] = int(text.split()[0]) << 10
            if len(sizes) == 2:
                return min(sizes.values()), sizes[b"MemTotal"]
    import psutil  # the import takes longer than all of the above

    memory = psutil.virtual_memory()
    return min(memory.available, memory.total), memory.total


class CoresLimit(NamedTuple):
    """Limit on the processor time of a group, in cores: 1.5 means 1.5 seconds in each second."""

    cores: float
    group: int  # inode of the group, the same for all processes of the host


class MemoryLimit(NamedTuple):
    """Limit on the main memory of a group."""

    available_bytes: int  # remaining memory before the kernel throttles or kills processes
    total_bytes: int
    group: int  # inode of the group, the same for all processes of the host


def cores_limit(proc: Path = _PROC) -> CoresLimit | None:
    """Return the lowest limit on processor time among this process's groups, or None if no group has one.

    ``proc``: folder with ``cgroup`` and ``mountinfo`` of the process.
    """
    limits = []
    for version, folder in _folders("cpu", proc):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:  # in version 1, -1 means no limit
                limits.append(CoresLimit(int(quota) / int(period), folder.stat().st_ino))
    return min(limits, default=None)


def memory_limit(proc: Path = _PROC) -> MemoryLimit | None:
    """Return the limit of the group with the least available memory, or None if no group has a limit.

    Caches count as available, because the kernel reclaims them first.
    """
    limits = []
    for version, folder in _folders("memory", proc):
        with suppress(OSError, ValueError):
            limit = _limit(folder, version)
            if limit is None:
                continue
            used = int((folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            names = _RECLAIMABLE if version == 2 else _RECLAIMABLE_V1
            reclaimable = sum(int(line.split()[1]) for line in lines if line.split()[0] in names)
            available = min(limit, max(0, limit - used + reclaimable))
            limits.append(MemoryLimit(available, limit, folder.stat().st_ino))
    return min(limits, default=None)


def available_memory() -> tuple[int, int]:
    """Return the available and the total main memory of this process in bytes, within its groups' limits."""
    available, total = host_memory()
    limit = memory_limit()
    if limit is None:
        return available, total
    return min(available, limit.available_bytes), min(total, limit.total_bytes)


def oom_kills(proc: Path = _PROC) -> int:
    """Return the number of processes killed by the out-of-memory killer in this process's group.

    Kills in the groups below count as well, whichever group's limit was exceeded. If this process has no
    memory group, the number covers the whole host. Returns 0 if the number is unknown.
    """
    for version, folder in _folders("memory", proc)[:1]:
        with suppress(OSError, ValueError, StopIteration):
            return _oom_kills_in(folder / ("memory.events" if version == 2 else "memory.oom_control"))
    with suppress(OSError, ValueError, StopIteration):
        return _oom_kills_in(_VMSTAT)
    return 0


def _oom_kills_in(path: Path) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[:1] == ["oom_kill"])


def is_killed_as_one(proc: Path = _PROC) -> bool:
    """Return True if the out-of-memory killer always kills all processes of this process's group.

    Kubernetes sets ``memory.oom.group`` for each container.
    """
    for version, folder in _folders("memory", proc):
        with suppress(OSError):
            if version == 2 and (folder / "memory.oom.group").read_text().strip() == "1":
                return True
    return False


def process_count(proc: Path = _PROC) -> tuple[int, int] | None:
    """Return the number of processes and threads in a group, and the group's limit on that number.

    Of this process's groups, this group can start the fewest more processes. Returns None if no group has
    a limit.
    """
    counts = []
    for _, folder in _folders("pids", proc):  # both versions have the same files
        with suppress(OSError, ValueError):  # a ValueError means "max": no limit
            limit = int((folder / "pids.max").read_text())
            counts.append((int((folder / "pids.current").read_text()), limit))
    return min(counts, key=lambda count: count[1] - count[0], default=None)


def unified(proc: Path = _PROC) -> list[Path]:
    """Return this process's group of version 2 and the groups above it, or [] without version 2."""
    # Version 1 has no controller dmem. So a search for dmem never finds a group of version 1.
    return [folder for version, folder in _folders("dmem", proc) if version == 2]


def _limit(folder: Path, version: int) -> int | None:
    # In version 1, the file of an unlimited group holds a huge number: the largest multiple of the page size.
    if version == 1:
        return int((folder / "memory.limit_in_bytes").read_text())
    limits = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
    return min((int(limit) for limit in limits if limit != "max"), default=None)


def _folders(controller: str, proc: Path) -> list[tuple[int, Path]]:
    """Return the version and folder of this process's group for a controller, then of the groups above it."""
    try:
        groups = (proc / "cgroup").read_text()
    except OSError:  # not Linux
        return []
    return list(_resolved_folders(controller, groups, proc))


# Cached, because the list of mounts may be long, and each call of a client needs it.
@lru_cache(maxsize=8)
def _resolved_folders(controller: str, groups: str, proc: Path) -> tuple[tuple[int, Path], ...]:
    """Return the result of :func:`_folders`, computed once for each content of ``/proc/<pid>/cgroup``.

    The content changes when the process is moved to another group.
    """
    # A line of version 1 lists its controllers. The line of version 2 lists none, and comes last. So it is
    # reached only if version 1 does not have the controller.
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        is_version_1 = controller in controllers.split(",")
        if is_version_1 or not controllers:
            with suppress(OSError):
                mounts = _mounts(controller if is_version_1 else None, proc)
                chains = [_chain(path, root, mount_point) for root, mount_point in mounts]
                # The same tree may be mounted several times. The longest chain is the most complete one,
                # because a mount may show only a part of the tree.
                return tuple(
                    (1 if is_version_1 else 2, folder) for folder in max(chains, key=len, default=[])
                )
    return ()


def _mounts(controller: str | None, proc: Path) -> list[tuple[str, Path]]:
    """Return the root and the mount point of each mount of a controller of version 1.

    If ``controller`` is None, return the mounts of version 2, which are the same for all controllers.
    """
    mounts = []
    for line in (proc / "mountinfo").read_text().splitlines():
        mount_fields, _, filesystem_fields = line.partition(" - ")
        kind, _, options = filesystem_fields.split(maxsplit=2)
        if kind == ("cgroup2" if controller is None else "cgroup") and (
            controller is None or controller in options.split(",")
        ):
            fields = mount_fields.split()[3:5]
            root, mount_point = (
                re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text) for text in fields
            )
            mounts.append((root, Path(mount_point)))
    return mounts


def _chain(path: str, root: str, mount_point: Path) -> list[Path]:
    """Return the folders of a group and of the groups above it, as far as this mount shows them."""
    # In a container, only the container's part of the tree may be mounted, and ``root`` is the top of that
    # part. If the path is the host's, it begins with ``root``. If it has "..", the group lies outside the
    # mounted part, and the top of that part stands for it.
    relative = PurePosixPath(path)
    relative = relative.relative_to(root if relative.is_relative_to(root) else "/")
    own_group = mount_point if ".." in relative.parts else mount_point / relative
    return [
        folder
        for folder in (own_group, *own_group.parents)
        if folder.is_relative_to(mount_point) and folder.is_dir()
    ]
