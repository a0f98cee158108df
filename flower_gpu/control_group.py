"""Cores and memory of this host, and the limits of this process's control groups (Linux, versions 1 and 2).

They are counted here and nowhere else, so that all who share them count alike. A limit of any group above
this process's own counts, too: inside of a container that may be the only one.
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
# What the kernel can take back from a group before it kills in it: the page cache, and its own caches. Shared
# memory (tmpfs) is not among these: it counts as anonymous. Version 1 has totals with the groups below.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")


def processors() -> int:
    """Count the processors of the host that are online."""
    # Not os.cpu_count(): PYTHON_CPU_COUNT changes what that says.
    return max(1, os.sysconf("SC_NPROCESSORS_ONLN"))


@cache
def all_cores() -> int:
    """Count all cores of the host."""
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
    """Count the cores of these processors: the two threads of a core count once.

    PyTorch starts one thread for both, too.
    """
    siblings = "cpu{}/topology/thread_siblings_list"
    try:
        return len({(_CPUS / siblings.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        return len(cpus)


def host_memory() -> tuple[int, int]:
    """Return how many bytes of the host's main memory can be used, and how many there are."""
    found = {}
    with suppress(OSError, ValueError), _MEMORY.open("rb") as file:  # OSError: not Linux
        for line in file:
            name, _, text = line.partition(b":")
            if name in (b"MemTotal", b"MemAvailable"):
                found[name] = int(text.split()[0]) << 10
            if len(found) == 2:
                return min(found.values()), found[b"MemTotal"]
    import psutil  # takes longer than all of the above

    memory = psutil.virtual_memory()
    return min(memory.available, memory.total), memory.total


class CoresLimit(NamedTuple):
    """How much of the processors the processes of a group may use together."""

    cores: float
    group: int  # a number that all processes of the host know the group by


class MemoryLimit(NamedTuple):
    """How much main memory the processes of a group may use together."""

    available_bytes: int  # can still be used before the kernel slows down or kills
    total_bytes: int
    group: int  # a number that all processes of the host know the group by


def cores_limit(proc: Path = _PROC) -> CoresLimit | None:
    """Return the least processors' time of this process's groups; None where nothing limits it.

    ``proc``: where ``cgroup`` and ``mountinfo`` of the process are.
    """
    found = []
    for version, folder in _folders("cpu", proc):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:  # version 1 says -1 where there is none
                found.append(CoresLimit(int(quota) / int(period), folder.stat().st_ino))
    return min(found, default=None)


def memory_limit(proc: Path = _PROC) -> MemoryLimit | None:
    """Return the limit of the group that has the least available; None where nothing limits it.

    What only caches files counts as available: the kernel takes it back first.
    """
    found = []
    for version, folder in _folders("memory", proc):
        with suppress(OSError, ValueError):
            limit = _limit(folder, version)
            if limit is None:
                continue
            used = int((folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            names = _RECLAIMABLE if version == 2 else _RECLAIMABLE_V1
            taken_back = sum(int(line.split()[1]) for line in lines if line.split()[0] in names)
            available = min(limit, max(0, limit - used + taken_back))
            found.append(MemoryLimit(available, limit, folder.stat().st_ino))
    return min(found, default=None)


def available_memory() -> tuple[int, int]:
    """Return the bytes that can be used before the host, or a group, kills; and all that this process has."""
    available, total = host_memory()
    limit = memory_limit()
    if limit is None:
        return available, total
    return min(available, limit.available_bytes), min(total, limit.total_bytes)


def oom_kills(proc: Path = _PROC) -> int:
    """Return how many processes of this process's group the kernel has killed for want of memory; 0: unknown.

    It counts kills in groups below as well, whichever limit was reached. Without such groups, those of the
    whole host are counted.
    """
    for version, folder in _folders("memory", proc)[:1]:
        with suppress(OSError, ValueError, StopIteration):
            return _count(folder / ("memory.events" if version == 2 else "memory.oom_control"))
    with suppress(OSError, ValueError, StopIteration):
        return _count(_VMSTAT)
    return 0


def _count(path: Path) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[:1] == ["oom_kill"])


def is_killed_as_one(proc: Path = _PROC) -> bool:
    """Return True if the kernel kills all processes of this process's group where one would do.

    Kubernetes sets ``memory.oom.group`` for each container.
    """
    for version, folder in _folders("memory", proc):
        with suppress(OSError):
            if version == 2 and (folder / "memory.oom.group").read_text().strip() == "1":
                return True
    return False


def process_count(proc: Path = _PROC) -> tuple[int, int] | None:
    """Return how many processes and threads there are, and how many there may be, in the fullest group."""
    found = []
    for _, folder in _folders("pids", proc):  # its files are the same in both versions
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit = int((folder / "pids.max").read_text())
            found.append((int((folder / "pids.current").read_text()), limit))
    return min(found, key=lambda one: one[1] - one[0], default=None)


def unified(proc: Path = _PROC) -> list[Path]:
    """Return this process's group of version 2 and those above it; empty where there are none."""
    return [folder for version, folder in _folders("dmem", proc) if version == 2]  # a controller of it only


def _limit(folder: Path, version: int) -> int | None:
    if version == 1:  # without a limit it is the largest number of whole pages
        return int((folder / "memory.limit_in_bytes").read_text())
    limits = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
    return min((int(limit) for limit in limits if limit != "max"), default=None)


def _folders(controller: str, proc: Path) -> list[tuple[int, Path]]:
    """Return version and folder of this process's group for a controller, and of all groups above it."""
    try:
        groups = (proc / "cgroup").read_text()
    except OSError:  # not Linux
        return []
    return list(_found(controller, groups, proc))


@lru_cache(maxsize=8)  # the list of mounts may be long, and is needed for each call of a client
def _found(controller: str, groups: str, proc: Path) -> tuple[tuple[int, Path], ...]:
    """Find the folders by ``/proc/<pid>/cgroup``, which has another text once the process is moved."""
    for line in groups.splitlines():  # version 2 comes last: a controller is in one version only
        _, controllers, path = line.split(":", 2)
        is_old = controller in controllers.split(",")
        if is_old or not controllers:
            with suppress(OSError):
                mounts = _mounts(controller if is_old else None, proc)
                found = [_up(path, root, point) for root, point in mounts]
                # The one that shows most: a part of the tree may be mounted elsewhere, too.
                return tuple((1 if is_old else 2, folder) for folder in max(found, key=len, default=[]))
    return ()


def _mounts(controller: str | None, proc: Path) -> list[tuple[str, Path]]:
    """Return root and place of each mount of a controller of version 1; None: of version 2."""
    found = []
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(maxsplit=2)
        if kind == ("cgroup2" if controller is None else "cgroup") and (
            controller is None or controller in options.split(",")
        ):
            fields = before.split()[3:5]
            root, point = (re.sub(r"\\(\d{3})", lambda at: chr(int(at[1], 8)), text) for text in fields)
            found.append((root, Path(point)))
    return found


def _up(path: str, root: str, point: Path) -> list[Path]:
    """Return the folder of a group and of those above it, as far as this mount shows them."""
    # A container may see the host's path and a mount of its own part only, or a path above what is mounted.
    relative = PurePosixPath(path)
    relative = relative.relative_to(root if relative.is_relative_to(root) else "/")
    own = point if ".." in relative.parts else point / relative
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(point) and folder.is_dir()]
