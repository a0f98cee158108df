"""The fork server that fits a process, and the settings that its workers take over from a caller.

Two processes share a server if they have the same identity. The identity contains everything that a fork gets
from its server and cannot change. Settings that a fork can change, such as the working directory and most of
the environment, are sent with each call as :class:`Inherited`.
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
from flower_gpu.gpu import drivers
from flower_gpu.workers import own_process
from flower_gpu.workers.forkserver import attributes

#: Numbers of the resource limits of this system. The set removes a duplicate, because two names stand for the
#: same limit.
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

#: Limits that are part of a server's identity, because a fork cannot take them over from its caller. The
#: stack limit is read when a program starts, for the stacks of its threads. A limit of memory could be lower
#: than the memory that the libraries of another server take.
SHAPING_LIMITS = (resource.RLIMIT_STACK, resource.RLIMIT_AS, resource.RLIMIT_DATA)


@dataclass(frozen=True)
class Inherited:
    """Attributes of a process that its children inherit. Plain values, so that they can be sent as JSON."""

    environ: dict[str, str]  # all environment variables
    path: list[str]  # ``sys.path``
    umask: int  # file mode creation mask
    cpus: list[int] = field(default_factory=list)  # CPU numbers that it may run on
    limits: dict[str, list[int]] = field(default_factory=dict)  # soft and hard resource limits by number
    attributes: dict[str, str] = field(default_factory=dict)  # result of :func:`.attributes.settable`

    @classmethod
    def of_this_process(cls, env: dict[str, str]) -> Inherited:
        """Return the attributes of this process, with the variables of ``env`` added to its environment."""
        return cls(
            environ=own_process.environment(env),
            path=[entry for entry in sys.path if isinstance(entry, str)],
            umask=_umask(),
            cpus=sorted(os.sched_getaffinity(0)),
            limits={str(number): list(resource.getrlimit(number)) for number in LIMITS},
            attributes=attributes.settable(),
        )

    def apply(self, folder: int) -> None:
        """Apply the attributes to this process, which must serve one caller only.

        ``folder``: descriptor of the working directory.
        """
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        os.umask(self.umask)
        for step in (lambda: os.fchdir(folder), lambda: os.sched_setaffinity(0, self.cpus)):
            _try(step)  # The folder may be removed, and CPUs may be offline by now.
        for number, (soft, hard) in self.limits.items():
            _try(resource.setrlimit, int(number), (soft, hard))
        attributes.set_anew(self.attributes)
        tempfile.tempdir = None  # TMPDIR may have changed.


def _try(function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except (OSError, ValueError):
        # The system may refuse a setting. For example, a process may not raise a limit above the server's
        # hard limit.
        return


def _umask() -> int:
    # os.umask() can only read the mask by changing it, and that would affect other threads.
    return int(attributes.status().get("Umask", "022"), 8)


# Prefixes of variables that the interpreter or C libraries read when they are loaded. A fork cannot change
# their effect.
_READ_AT_START: tuple[str, ...] = ("ATEN_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_")
_READ_AT_START += ("MKL_", "OMP_", "OPENBLAS_", "PYTHON")
# Exceptions: variables that are set in each worker anyway, or do not matter to a worker.
_SET_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONSTARTUP", "PYTHONINSPECT"}
# scikit-learn sets these when it is imported.
_SET_LATER |= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
_THREADS = "_NUM_THREADS"
# Each job of a batch system has its own servers, because it gets its own memory, CPUs and GPUs.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "OAR_JOB_ID")
#: Each lease sets this variable to another value. Servers must not depend on that, so only an empty value is
#: part of the identity, because it hides all GPUs.
VISIBLE_DEVICES = drivers.of_host().visible_variable
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


def server_name(
    environ: Mapping[str, str], variables: Iterable[str], without: Iterable[str], more: Any = None
) -> str:
    """Return the name of the fork server that fits this process in its present state.

    ``variables``: environment variables that the server's libraries read when they are imported.
    ``without``: top-level names of libraries that the server must not import.
    ``more``: further parts of the identity, such as the preload functions.
    """
    values = {name: seen(environ, name) for name in sorted(variables)}
    identity = [_this_process(environ), values, sorted(without), more]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]


def seen(environ: Mapping[str, str | None], name: str) -> str | None:
    """Return the value of an environment variable that counts for libraries; None if it is not set.

    A list of visible GPUs counts as not set (:data:`VISIBLE_DEVICES`).
    """
    value = environ.get(name)
    return None if name == VISIBLE_DEVICES and value else value


def digests(environ: Mapping[str, str | None], names: Iterable[str]) -> dict[str, str]:
    """Return a digest of the value of each set variable in ``names``. A digest does not reveal the value."""
    values = ((name, seen(environ, name)) for name in names)
    return {
        name: hashlib.blake2b(os.fsencode(value), digest_size=16).hexdigest()
        for name, value in values
        if value is not None
    }


def installed_folders(path: Iterable[str]) -> list[str]:
    """Return the entries of a ``sys.path`` that hold installed packages, not a user's own modules."""
    return [entry for entry in path if isinstance(entry, str) and entry and _holds_packages(entry)]


def packages() -> list[tuple[str, str]]:
    """Return the folders with installed packages on ``sys.path``, each with a digest of its packages."""
    return [(entry, _packages(entry, os.stat(entry).st_mtime_ns)) for entry in installed_folders(sys.path)]


def server_path() -> list[str]:
    """Return the part of ``sys.path`` that the server imports libraries from."""
    parent = str(Path(flower_gpu.__file__).parents[1])
    folders = {*installed_folders(sys.path), *_standard_library(), parent}
    return [entry for entry in sys.path if entry in folders]


def _this_process(environ: Mapping[str, str]) -> list[Any]:
    """Return the parts of the identity that do not depend on the libraries of the server."""
    read_at_start = {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_START) and name not in _SET_LATER and not name.endswith(_THREADS)
    }
    return [
        attributes.of_server(),
        # The interpreter of a virtual environment has several names, and scripts use any of them.
        [os.path.dirname(sys.executable), os.path.realpath(sys.executable), sys.version, interpreter_flags()],
        # This package may be an editable install, which packages() does not see.
        [packages(), _own_files()],
        sorted(read_at_start.items()),
        [environ.get(name) for name in _JOBS],
        [_link(f"/proc/self/ns/{name}") for name in _NAMESPACES],
        # A process in a chroot has another root folder.
        [os.stat("/").st_dev, os.stat("/").st_ino],
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
    """Return the command that calls a function in a fresh interpreter.

    ``function``: the function as ``"package.module:function"``.
    ``path``: value of ``sys.path`` in that interpreter.
    """
    module, name = function.split(":")
    program = f"import sys; sys.path[:] = {list(path)!r}; from {module} import {name}; {name}()"
    return [sys.executable, *interpreter_flags(), "-c", program]


def script_folders() -> list[str]:
    """Return the folders with this Python environment's commands. Flower starts its programs by name."""
    # The path is not resolved, because the python of a virtual environment is a link to another folder.
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
    except OSError:  # a missing folder
        return False
    return Path(folder).name in ("site-packages", "dist-packages") or _has_metadata(folder, modified_ns)


@cache
def _has_metadata(folder: str, _mtime_ns: int) -> bool:
    try:
        with os.scandir(folder) as entries:
            # .egg-info does not count, because an editable install leaves it in the project's own folder.
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False


@cache
def _packages(folder: str, _mtime_ns: int) -> str:
    """Return a digest that changes with each install, update or removal of a package in ``folder``.

    The modification time of the folder is not used, because Python creates ``__pycache__`` there when it
    first imports a single-file module. The times of packages' folders change for the same reason. Installers
    create a new ``.dist-info``, and copying a package by hand changes its ``__init__.py``.
    """
    modified = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            is_package = entry.is_dir() and not entry.name.endswith((".dist-info", ".egg-info"))
            try:
                changed = os.stat(os.path.join(entry.path, "__init__.py") if is_package else entry.path)
                modified.append((entry.name, changed.st_mtime_ns))
            except OSError:  # a namespace package, or no package
                modified.append((entry.name, 0))
    return hashlib.sha256(repr(sorted(modified)).encode()).hexdigest()


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
    """Return the control group of this process, without a last part that sets no limits.

    Each terminal has such a part, and processes of several terminals can share a server.
    """
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
