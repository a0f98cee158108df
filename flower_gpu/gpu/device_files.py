"""The device files of all GPUs of the host, and the numbers of the devices behind files."""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from flower_gpu.gpu import drivers
from flower_gpu.options import DEVICES_VARIABLE, GPU_GUARD, GUARDED_VARIABLE

_DEV: Final = Path("/dev")
_DRM: Final = Path("/sys/class/drm")
_MOUNTS: Final = Path("/proc/self/mountinfo")

#: Value of the variable with a worker's device files if those of one of its GPUs are unknown
EVERYTHING: Final = "*"


def of_host(environ: Mapping[str, str]) -> list[str]:
    """Return all files and folders of this host that give access to GPUs."""
    prefixes = tuple(driver.device_prefix for driver in drivers.DRIVERS)
    named = environ.get(GUARDED_VARIABLE, "").split(os.pathsep)
    paths = [os.path.abspath(path) for path in named if path]  # noqa: PTH100 - each worker does it
    mounts = list(_second_mounts())  # a container may have the host's device files twice
    for folder in (_DEV, *(mount_point for _, mount_point in mounts)):
        with suppress(OSError), os.scandir(folder) as entries:
            paths += [entry.path for entry in entries if entry.name.startswith(prefixes)]
        with suppress(OSError), os.scandir(folder / "dri") as entries:
            paths += [entry.path for entry in entries if _is_node_of_gpu(entry.name)]
    paths += [str(mount_point) for root, mount_point in mounts if Path(root).name.startswith(prefixes)]
    return list(dict.fromkeys(paths))


def are_limited(environ: Mapping[str, str]) -> bool:
    """Return True if a worker with this environment may not open the device files of all GPUs."""
    has_files = environ.get(DEVICES_VARIABLE, EVERYTHING) != EVERYTHING
    return has_files and GPU_GUARD.resolve(None, environ) != "off"


def granted(environ: Mapping[str, str]) -> list[str]:
    """Return the device files that a worker with this environment may open."""
    if not are_limited(environ):
        return of_host(environ)
    files = [path for path in environ[DEVICES_VARIABLE].split(os.pathsep) if path]
    return [*files, *drivers.of_host().shared_files] if files else []


def _second_mounts() -> Iterator[tuple[str, Path]]:
    """Yield the mounts of device files outside of ``/dev``: the mounted part, and the mount point."""
    with suppress(OSError):
        dev = _DEV.stat().st_dev
        number = f"{os.major(dev)}:{os.minor(dev)}"
        for line in _MOUNTS.read_text().splitlines():  # proc_pid_mountinfo(5)
            fields, _, file_system = line.partition(" - ")
            _, _, device, root, mount_point, *_ = fields.split()
            if device == number or file_system.startswith("devtmpfs "):
                root, mount_point = _unescaped(root), _unescaped(mount_point)
                if not Path(mount_point).is_relative_to(_DEV):
                    yield root, Path(mount_point)


def _unescaped(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), field)


def _is_node_of_gpu(name: str) -> bool:
    with suppress(OSError):
        vendor = (_DRM / name / "device" / "vendor").read_text().strip()
        return any(vendor == driver.pci_vendor for driver in drivers.DRIVERS)
    return False


def numbers(paths: Iterable[str]) -> set[int]:
    """Return the device numbers of these files, and of the files in these folders."""
    device_numbers = set()
    for path in paths:
        with suppress(OSError):
            file = Path(path).stat()
            if stat.S_ISDIR(file.st_mode):
                device_numbers |= numbers(entry.path for entry in os.scandir(path))
            elif stat.S_ISCHR(file.st_mode):
                device_numbers.add(file.st_rdev)
    return device_numbers


# Mode and device number in ``struct statx`` of statx(2)
_STATX: Final = struct.Struct("=28xH98xII120x")
_STATX_FLAGS: Final = 0x1000 | 0x4000  # AT_EMPTY_PATH, AT_STATX_DONT_SYNC of linux/fcntl.h
_STATX_TYPE: Final = 1


def number_of(descriptor: int) -> int | None:
    """Return the device number of an open file, or None if it is not a character device.

    The kernel answers from its cache. ``os.fstat`` would ask the server of a network disk, and a dead server
    never answers.
    """
    if (statx := _statx()) is None:
        file = os.fstat(descriptor)
        return file.st_rdev if stat.S_ISCHR(file.st_mode) else None
    buffer = ctypes.create_string_buffer(_STATX.size)
    if statx(descriptor, b"", _STATX_FLAGS, _STATX_TYPE, buffer):
        return None
    mode, major, minor = _STATX.unpack(buffer.raw)
    return os.makedev(major, minor) if stat.S_ISCHR(mode) else None


@cache  # loading the library takes longer than the call
def _statx() -> Callable[..., int] | None:
    """Return ``statx`` of the C library, or None if the library is older than 2018."""
    return getattr(ctypes.CDLL(None), "statx", None)
