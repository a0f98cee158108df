"""The GPU guard: a worker can open the device files of its lease's GPUs, and of no other.

The caller tells a worker which files these are (:func:`environment`). The worker gives up all others before
any code of an app is imported (:func:`apply`), and the kernel holds it to that, with all that it starts,
whatever they set ``CUDA_VISIBLE_DEVICES`` to.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from flower_gpu import landlock
from flower_gpu.errors import ConfigError
from flower_gpu.options import DEVICES_VARIABLE, GUARD_VARIABLE, GUARDED_VARIABLE, value_of

_DEV: Final = Path("/dev")
_DRM: Final = Path("/sys/class/drm")
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"  # vendor in PCI's table of identifiers
#: Lines such as "gpu0/gi1/ci0/access 13" (NVIDIA's MIG user guide, "Device Nodes and Capabilities").
_MIG_MINORS: Final = Path("/proc/driver/nvidia-caps/mig-minors")

_CONTROL: Final = _DEV / "nvidiactl"
_MEMORY: Final = _DEV / "nvidia-uvm"
#: Files that CUDA needs besides those of its GPUs.
_SHARED: Final = tuple(map(str, (_CONTROL, _MEMORY, _DEV / "nvidia-uvm-tools")))

_EVERYTHING: Final = "*"  # the value of the variable where nobody knows a GPU's files


def files_of_card(minor: int, bus_id: str | None) -> tuple[str, ...]:
    """Return the device files of a card.

    Parameters
    ----------
    minor : int
        Its minor number, as the driver tells.
    bus_id : str, optional
        Its address, such as ``"00000000:3B:00.0"``; for its render node.
    """
    return (f"{_DEV}/nvidia{minor}", *(_render_nodes(bus_id) if bus_id else ()))


def files_of_mig(minor: int, gpu_instance: int, compute_instance: int) -> tuple[str, ...] | None:
    """Return the device files of a MIG device; None where the driver does not tell them.

    Parameters
    ----------
    minor : int
        The minor number of its card.
    gpu_instance, compute_instance : int
        Its instances' ids on that card.
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


def environment(files: Iterable[tuple[str, ...] | None]) -> dict[str, str]:
    """Return what tells a worker which device files it may open, if this process's environment has a guard.

    Parameters
    ----------
    files : iterable of tuple of str
        The files of each GPU of its lease; None where they are not known.

    Raises
    ------
    ConfigError
        If a guard is required and there can be none.
    """
    wanted = value_of(GUARD_VARIABLE, os.environ)
    if wanted == "off":
        return {}
    found: list[str] = []
    for each in files:
        if each is None:
            if wanted == "require":
                raise _required("the driver does not tell the device files of a GPU")
            return {DEVICES_VARIABLE: _EVERYTHING}
        found += each
    return {DEVICES_VARIABLE: os.pathsep.join(found)}


def problem(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why workers of this host cannot be kept from GPUs; None where they can."""
    if value_of(GUARD_VARIABLE, environ) == "off":
        return "it is turned off"
    try:
        landlock.version()
    except landlock.UnavailableError as error:
        return str(error)
    return None


def describe(environ: Mapping[str, str] = os.environ) -> str:
    """Return a line about the guard of this host; empty where there is no GPU to be kept from."""
    if not device_files(environ):
        return ""
    if reason := problem(environ):
        return f"no GPU guard: apps can use any GPU of this host ({reason})"
    return f"GPU guard: the kernel keeps workers to the GPUs of their lease (Landlock {landlock.version()})"


def check(environ: Mapping[str, str]) -> None:
    """Look whether there is a guard where the operator requires one.

    Raises
    ------
    ConfigError
        If there can be none.
    """
    if value_of(GUARD_VARIABLE, environ) == "require" and (reason := problem(environ)):
        raise _required(reason)


def check_without_worker(environ: Mapping[str, str]) -> None:
    """Refuse a call in a process that must not give anything up, where the operator requires a guard.

    Raises
    ------
    ConfigError
        If so.
    """
    if value_of(GUARD_VARIABLE, environ) == "require":
        raise _required("this call has no worker of its own")


_is_applied = False


def apply(environ: Mapping[str, str]) -> None:
    """Give up, in this worker and all that it starts, every GPU's files but those of its lease.

    A worker that runs several calls does so for the first one: they all have the same variables.

    Raises
    ------
    ConfigError
        If a guard is required and there can be none.
    """
    global _is_applied
    told = environ.get(DEVICES_VARIABLE)
    if _is_applied or told in (None, _EVERYTHING) or value_of(GUARD_VARIABLE, environ) == "off":
        return
    refused = device_files(environ)
    if not refused:  # no driver, and nothing to be kept from
        return
    if files := granted(environ):
        _make_missing()
    try:
        _close(refused, files)
        with landlock.without(refused, files).rules as rules:
            rules.restrict_self()
    except landlock.UnavailableError as error:
        if value_of(GUARD_VARIABLE, environ) == "require":
            raise _required(str(error)) from None
        return
    _is_applied = True


def granted(environ: Mapping[str, str]) -> list[str]:
    """Return the device files that a worker with this environment may open; all where none are refused."""
    told = environ.get(DEVICES_VARIABLE)
    if told in (None, _EVERYTHING) or value_of(GUARD_VARIABLE, environ) == "off":
        return device_files(environ)
    files = [path for path in (told or "").split(os.pathsep) if path]
    return [*files, *_SHARED] if files else []


def device_files(environ: Mapping[str, str]) -> list[str]:
    """Return the files and folders of this host by which GPUs of NVIDIA can be opened."""
    found = [path for path in environ.get(GUARDED_VARIABLE, "").split(os.pathsep) if path]
    for folder in _device_folders():
        with suppress(OSError), os.scandir(folder) as entries:
            found += [entry.path for entry in entries if entry.name.startswith("nvidia")]
        with suppress(OSError), os.scandir(folder / "dri") as entries:
            found += [entry.path for entry in entries if _is_nvidias(entry.name)]
    return found


def _device_folders() -> Iterator[Path]:
    """Yield ``/dev``, and where else the host's device files are mounted: a container may have them twice."""
    yield _DEV
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, more = line.partition(" - ")
            place = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields.split()[4]))
            if more.startswith("devtmpfs ") and place != _DEV:
                yield place


def _is_nvidias(name: str) -> bool:
    try:
        return (_DRM / name / "device" / "vendor").read_text().strip() == _NVIDIA
    except OSError:
        return False


def _make_missing() -> None:
    """Have NVIDIA's own helper make the file that CUDA makes when it starts: guarded, it could not."""
    if _CONTROL.exists() and not _MEMORY.exists():
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["nvidia-modprobe", "-u", "-c", "0"], timeout=30, check=False)


def _close(refused: Collection[str], granted: Collection[str]) -> None:
    """Close what this process has open of refused devices, such as what a preload function has left."""
    devices = _numbers(refused) - _numbers(granted)
    for descriptor in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            found = os.fstat(descriptor)
            if stat.S_ISCHR(found.st_mode) and found.st_rdev in devices:
                os.close(descriptor)


def _numbers(paths: Iterable[str]) -> set[int]:
    """Return the device numbers of these files, and of those in these folders."""
    found = set()
    for path in paths:
        with suppress(OSError):
            file = Path(path).stat()
            if stat.S_ISDIR(file.st_mode):
                found |= _numbers(entry.path for entry in os.scandir(path))
            elif stat.S_ISCHR(file.st_mode):
                found.add(file.st_rdev)
    return found


def _required(reason: str) -> ConfigError:
    return ConfigError(
        f"--gpu-guard require ({GUARD_VARIABLE}): workers of this host cannot be kept from GPUs that are not "
        f"theirs: {reason}. Use another host, or --gpu-guard on, which does without"
    )
