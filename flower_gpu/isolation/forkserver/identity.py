"""Which fork server a process can use: everything that a fork has from its server and cannot change.

Two processes with the same identity share a server. What differs harmlessly (working directory, most of the
environment) is sent with each call instead, see :mod:`~flower_gpu.isolation.forkserver.inherited`.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import flower_gpu
from flower_gpu.isolation.forkserver.inherited import LIMITS, SHAPING_LIMITS

# Read by the interpreter or by C libraries when they are loaded, so a fork cannot change them any more.
_READ_AT_START: tuple[str, ...] = ("ATEN_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_")
_READ_AT_START += ("MKL_", "OMP_", "OPENBLAS_", "PYTHON")
# Of these, what is set in each worker anyway, or says nothing about a worker.
_SET_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONSTARTUP", "PYTHONINSPECT"}
_SET_LATER |= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # by scikit-learn, in whoever imports it
_THREADS = "_NUM_THREADS"
# A batch system gives each job its own memory, processors and GPUs.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "OAR_JOB_ID")
#: Of it only matters whether it hides all GPUs: each lease has another value.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user")


def server_name(
    environ: Mapping[str, str], variables: Iterable[str], without: Iterable[str], more: Any = None
) -> str:
    """Return the name of the fork server for this process as it is now.

    Parameters
    ----------
    environ : mapping of str to str
        Environment variables of the worker.
    variables : iterable of str
        Environment variables that the server's libraries read when they are imported.
    without : iterable of str
        Top-level names of libraries that the server must not have.
    more : object
        Anything else that makes a server special (JSON).
    """
    values = {name: seen(environ, name) for name in sorted(variables)}
    identity = [_this_process(environ), values, sorted(without), more]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]


def seen(environ: Mapping[str, str | None], name: str) -> str | None:
    """Return what a library makes of an environment variable when it is imported."""
    value = environ.get(name)
    return None if name == VISIBLE_DEVICES and value else value


def installed_folders(path: Iterable[str]) -> list[str]:
    """Return the entries of a ``sys.path`` with installed packages in them, not with a user's own modules."""
    return [entry for entry in path if isinstance(entry, str) and entry and _holds_packages(entry)]


def server_path() -> list[str]:
    """Return the part of ``sys.path`` that the server imports libraries from."""
    own = str(Path(flower_gpu.__file__).parents[1])
    folders = {*installed_folders(sys.path), *_standard_library(), own}
    return [entry for entry in sys.path if entry in folders]


def _this_process(environ: Mapping[str, str]) -> list[Any]:
    read_at_start = {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_START) and name not in _SET_LATER and not name.endswith(_THREADS)
    }
    folders = [(entry, _packages(entry, os.stat(entry).st_mtime_ns)) for entry in installed_folders(sys.path)]
    return [
        [os.getuid(), os.getegid(), sorted(os.getgroups()), os.getpriority(os.PRIO_PROCESS, 0)],
        # A virtual environment's interpreter has several names: scripts are started by one or another.
        [os.path.dirname(sys.executable), os.path.realpath(sys.executable), sys.version, interpreter_flags()],
        # Our own files as well: they may be those of an editable install.
        [folders, _own_files()],
        sorted(read_at_start.items()),
        [environ.get(name) for name in _JOBS],
        [_link(f"/proc/self/ns/{name}") for name in _NAMESPACES],
        [os.stat("/").st_dev, os.stat("/").st_ino],  # another one in a chroot
        # A process cannot raise its hard limits.
        [resource.getrlimit(number)[1] for number in LIMITS],
        [resource.getrlimit(number) for number in SHAPING_LIMITS],
        _limiting_cgroup(),
    ]


def interpreter_flags() -> list[str]:
    """Return the options this interpreter was started with, such as ``-O`` or ``-W``."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


@cache
def _standard_library() -> frozenset[str]:
    library = Path(os.__file__).parent
    zipped = library.parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return frozenset(map(str, (zipped, library, library / "lib-dynload")))


def _holds_packages(folder: str) -> bool:
    try:
        modified_ns = os.stat(folder).st_mtime_ns
    except OSError:  # nothing
        return False
    return Path(folder).name in ("site-packages", "dist-packages") or _has_metadata(folder, modified_ns)


@cache
def _has_metadata(folder: str, _mtime_ns: int) -> bool:
    try:
        with os.scandir(folder) as entries:
            # Not .egg-info: an editable install leaves one in the project's own folder.
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False


@cache
def _packages(folder: str, _mtime_ns: int) -> str:
    """Return what is another text after an install, update or removal of a package in ``folder``.

    Not the folder's own time of change: Python writes ``__pycache__`` there when it first imports a module
    that is a single file. Nor the times of packages' folders, which get one, too. Installers make
    ``.dist-info`` anew; whoever copies a package by hand changes its ``__init__.py``.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            is_package = entry.is_dir() and not entry.name.endswith((".dist-info", ".egg-info"))
            try:
                changed = os.stat(os.path.join(entry.path, "__init__.py") if is_package else entry.path)
                found.append((entry.name, changed.st_mtime_ns))
            except OSError:  # a namespace package, or no package
                found.append((entry.name, 0))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


@cache
def _own_files() -> list[Any]:
    folder = Path(flower_gpu.__file__).parent
    stats = [path.stat() for path in sorted(folder.rglob("*.py"))]
    return [str(folder), len(stats), max(stat.st_mtime_ns for stat in stats), sum(s.st_size for s in stats)]


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _limiting_cgroup() -> str:
    """Return the control group, without a last part that limits nothing: each terminal is in one."""
    try:
        text = Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""
    group = text.strip()
    if group.startswith("0::") and group.endswith(".scope") and "\n" not in group:
        folder = Path("/sys/fs/cgroup") / group.removeprefix("0::/")
        limits = (folder / name for name in ("memory.max", "memory.high", "cpu.max"))
        if all(_is_unlimited(limit) for limit in limits):
            return group.rpartition("/")[0]
    return group


def _is_unlimited(limit: Path) -> bool:
    try:
        return limit.read_text().startswith("max")
    except OSError:  # the controller is not enabled here
        return True
