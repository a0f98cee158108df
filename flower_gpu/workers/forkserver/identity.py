"""The fork server that fits a process, and the settings that its workers take over from a caller.

Two processes share a server if they have the same identity: everything that a fork has from its server and
cannot change. What differs harmlessly (working directory, most of the environment) is sent with each call,
as :class:`Inherited`.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import flower_gpu
from flower_gpu.workers import own_process
from flower_gpu.workers.forkserver import attributes

#: Resource limits of this system, without the one that two names have.
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

#: Limits that a server must have itself: of the size of threads' stacks, which is read when a program starts,
#: and of memory, which could be less than what the libraries of another server take.
SHAPING_LIMITS = (resource.RLIMIT_STACK, resource.RLIMIT_AS, resource.RLIMIT_DATA)


@dataclass(frozen=True)
class Inherited:
    """Attributes of a process that its children share. Plain values, so that they can travel as JSON."""

    environ: dict[str, str]  # all environment variables
    path: list[str]  # ``sys.path``
    umask: int  # file mode creation mask
    cpus: list[int] = field(default_factory=list)  # processors it may run on
    limits: dict[str, list[int]] = field(default_factory=dict)  # soft and hard resource limits by number
    attributes: dict[str, str] = field(default_factory=dict)  # of :func:`.attributes.settable`

    @classmethod
    def of_this_process(cls, env: dict[str, str]) -> Inherited:
        """Collect the attributes of this process, with ``env`` on top of its environment."""
        return cls(
            environ=own_process.environment(env),
            path=[entry for entry in sys.path if isinstance(entry, str)],
            umask=_umask(),
            cpus=sorted(os.sched_getaffinity(0)),
            limits={str(number): list(resource.getrlimit(number)) for number in LIMITS},
            attributes=attributes.settable(),
        )

    def apply(self, folder: int) -> None:
        """Take them over, in a process that is there for one caller only."""
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        os.umask(self.umask)
        for step in (lambda: os.fchdir(folder), lambda: os.sched_setaffinity(0, self.cpus)):
            _try(step)  # the folder was removed; processors went away
        for number, (soft, hard) in self.limits.items():
            _try(resource.setrlimit, int(number), (soft, hard))
        attributes.set_anew(self.attributes)
        tempfile.tempdir = None  # TMPDIR may be another one


def _try(function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except (OSError, ValueError):  # not allowed to: limits above the server's own
        return


def _umask() -> int:
    # os.umask would change it, for other threads too.
    return int(attributes.status().get("Umask", "022"), 8)


# Read by the interpreter or by C libraries when they are loaded, so a fork cannot change them any more.
_READ_AT_START: tuple[str, ...] = ("ATEN_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_")
_READ_AT_START += ("MKL_", "OMP_", "OPENBLAS_", "PYTHON")
# Of these, what is set in each worker anyway, or says nothing about a worker.
_SET_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONSTARTUP", "PYTHONINSPECT"}
_SET_LATER |= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # by scikit-learn, when it is imported
_THREADS = "_NUM_THREADS"
# A batch system gives each job its own memory, processors and GPUs.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "OAR_JOB_ID")
#: Of it only matters whether it hides all GPUs: each lease has another value.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


def server_name(
    environ: Mapping[str, str], variables: Iterable[str], without: Iterable[str], more: Any = None
) -> str:
    """Return the name of the fork server for this process as it is now.

    ``variables``: environment variables that the server's libraries read when they are imported.
    ``without``: top-level names of libraries that the server must not have.
    """
    values = {name: seen(environ, name) for name in sorted(variables)}
    identity = [_this_process(environ), values, sorted(without), more]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]


def seen(environ: Mapping[str, str | None], name: str) -> str | None:
    """Return the value of an environment variable as a library sees it at its import."""
    value = environ.get(name)
    return None if name == VISIBLE_DEVICES and value else value


def digests(environ: Mapping[str, str | None], names: Iterable[str]) -> dict[str, str]:
    """Return digests of variables' values: equal for equal values, and not readable."""
    found = ((name, seen(environ, name)) for name in names)
    return {
        name: hashlib.blake2b(os.fsencode(value), digest_size=16).hexdigest()
        for name, value in found
        if value is not None
    }


def installed_folders(path: Iterable[str]) -> list[str]:
    """Return the entries of a ``sys.path`` with installed packages in them, not with a user's own modules."""
    return [entry for entry in path if isinstance(entry, str) and entry and _holds_packages(entry)]


def packages() -> list[tuple[str, str]]:
    """Return the folders with installed packages on ``sys.path``, each with a text that tells their state."""
    return [(entry, _packages(entry, os.stat(entry).st_mtime_ns)) for entry in installed_folders(sys.path)]


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
    return [
        attributes.of_server(),
        # A virtual environment's interpreter has several names: scripts are started by one or another.
        [os.path.dirname(sys.executable), os.path.realpath(sys.executable), sys.version, interpreter_flags()],
        # Our own files as well: they may be those of an editable install.
        [packages(), _own_files()],
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


def fresh_interpreter(function: str, path: Sequence[str]) -> list[str]:
    """Return the command that calls a function, ``"package.module:function"``, in a fresh interpreter.

    ``path``: what ``sys.path`` is set to there.
    """
    module, name = function.split(":")
    program = f"import sys; sys.path[:] = {list(path)!r}; from {module} import {name}; {name}()"
    return [sys.executable, *interpreter_flags(), "-c", program]


def script_folders() -> list[str]:
    """Folders of this Python environment's own commands; Flower starts its parts by their names."""
    # Not resolved: the python of a virtual environment is a link to one that lies elsewhere.
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    return list(dict.fromkeys(folders))


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
    """Return a text that changes with each install, update or removal of a package in ``folder``.

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
