"""The device files of NVIDIA's GPUs: of one GPU, and of all."""

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

from flower_gpu.options import GUARDED_VARIABLE

_DEV: Final = Path("/dev")
_DRM: Final = Path("/sys/class/drm")
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"  # vendor in PCI's table of identifiers
#: Lines such as "gpu0/gi1/ci0/access 13" (NVIDIA's MIG user guide, "Device Nodes and Capabilities").
_MIG_MINORS: Final = Path("/proc/driver/nvidia-caps/mig-minors")

_MOUNTS: Final = Path("/proc/self/mountinfo")

CONTROL: Final = _DEV / "nvidiactl"
MEMORY: Final = _DEV / "nvidia-uvm"
#: Files that CUDA needs besides those of its GPUs.
SHARED: Final = tuple(map(str, (CONTROL, MEMORY, _DEV / "nvidia-uvm-tools")))


def of_card(minor: int, bus_id: str | None) -> tuple[str, ...]:
    """Return the device files of a card.

    ``minor``: its minor number, as the driver tells.
    ``bus_id``: its address, such as ``"00000000:3B:00.0"``; for its render node.
    """
    return (f"{_DEV}/nvidia{minor}", *(_render_nodes(bus_id) if bus_id else ()))


def of_mig(minor: int, gpu_instance: int, compute_instance: int) -> tuple[str, ...] | None:
    """Return the device files of a MIG device; None where the driver does not tell them.

    ``minor``: the minor number of its card.
    ``gpu_instance``, ``compute_instance``: its instances' ids on that card.
    """
    try:
        lines = _MIG_MINORS.read_text().splitlines()
    except OSError:
        return None
    minors = dict(line.rsplit(maxsplit=1) for line in lines if line.strip())
    instance = f"gpu{minor}/gi{gpu_instance}"
    wanted = (f"{instance}/access", f"{instance}/ci{compute_instance}/access")
    if not all(name in minors for name in wanted):
        return None
    caps = (f"{_DEV}/nvidia-caps/nvidia-cap{minors[name]}" for name in wanted)
    return (f"{_DEV}/nvidia{minor}", *caps)


def _render_nodes(bus_id: str) -> Iterator[str]:
    domain, _, rest = bus_id.lower().partition(":")
    folder = _PCI_DEVICES / f"{domain[-4:]}:{rest}" / "drm"  # NVML writes the domain with eight digits
    with suppress(OSError):
        yield from (f"{_DEV}/dri/{one.name}" for one in folder.iterdir())


def of_host(environ: Mapping[str, str]) -> list[str]:
    """Return the files and folders of this host by which GPUs of NVIDIA can be opened."""
    named = environ.get(GUARDED_VARIABLE, "").split(os.pathsep)
    found = [os.path.abspath(path) for path in named if path]  # noqa: PTH100 - each worker does it
    mounts = list(_second_mounts())  # a container may have the host's device files twice
    for folder in (_DEV, *(place for _, place in mounts)):
        with suppress(OSError), os.scandir(folder) as entries:
            found += [entry.path for entry in entries if entry.name.startswith("nvidia")]
        with suppress(OSError), os.scandir(folder / "dri") as entries:
            found += [entry.path for entry in entries if _is_nvidias(entry.name)]
    found += [str(place) for root, place in mounts if Path(root).name.startswith("nvidia")]
    return list(dict.fromkeys(found))


def _second_mounts() -> Iterator[tuple[str, Path]]:
    """Yield the mounts of the host's device files outside of ``/dev``: what of these is there, and where."""
    with suppress(OSError):
        own = _DEV.stat().st_dev
        number = f"{os.major(own)}:{os.minor(own)}"
        for line in _MOUNTS.read_text().splitlines():  # proc_pid_mountinfo(5)
            fields, _, more = line.partition(" - ")
            _, _, device, root, place, *_ = fields.split()
            if device == number or more.startswith("devtmpfs "):
                root, place = _unescaped(root), _unescaped(place)
                if not Path(place).is_relative_to(_DEV):
                    yield root, Path(place)


def _unescaped(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), field)


def _is_nvidias(name: str) -> bool:
    try:
        return (_DRM / name / "device" / "vendor").read_text().strip() == _NVIDIA
    except OSError:
        return False


def numbers(paths: Iterable[str]) -> set[int]:
    """Return the device numbers of these files, and of those in these folders."""
    found = set()
    for path in paths:
        with suppress(OSError):
            file = Path(path).stat()
            if stat.S_ISDIR(file.st_mode):
                found |= numbers(entry.path for entry in os.scandir(path))
            elif stat.S_ISCHR(file.st_mode):
                found.add(file.st_rdev)
    return found


# ``struct statx`` of statx(2): the type of a file, and its device number if it is a device.
_STATX: Final = struct.Struct("=28xH98xII120x")
_OF_DESCRIPTOR: Final = 0x1000 | 0x4000  # AT_EMPTY_PATH, AT_STATX_DONT_SYNC of linux/fcntl.h
_TYPE: Final = 1  # STATX_TYPE


def number_of(descriptor: int) -> int | None:
    """Return the device number of an open file; None if the file is no character device.

    The kernel answers from its cache. ``os.fstat`` would ask the server of a network disk, and a dead one
    never answers.
    """
    if (statx := _statx()) is None:
        file = os.fstat(descriptor)
        return file.st_rdev if stat.S_ISCHR(file.st_mode) else None
    found = ctypes.create_string_buffer(_STATX.size)
    if statx(descriptor, b"", _OF_DESCRIPTOR, _TYPE, found):
        return None
    mode, major, minor = _STATX.unpack(found.raw)
    return os.makedev(major, minor) if stat.S_ISCHR(mode) else None


@cache  # to load the library takes longer than the call
def _statx() -> Callable[..., int] | None:
    """Return the function of the C library; None in one from before 2018."""
    return getattr(ctypes.CDLL(None), "statx", None)
