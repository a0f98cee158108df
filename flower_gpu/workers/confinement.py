"""Confinement: a worker gives up every right on this host that the app of a message does not need.

The caller lists the rights that the worker keeps (:class:`Confinement`, in an environment variable of the
worker). Before it imports any code of the app, the worker gives up all others with Landlock and seccomp
(:func:`apply`). The kernel enforces this for the worker and all its child processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import site
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flower_gpu import landlock, seccomp
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import device_files
from flower_gpu.gpu.nvidia import mps_pipes
from flower_gpu.options import CONFINED_VARIABLE
from flower_gpu.printable import path_text
from flower_gpu.workers import events, interpreter, state_folder, thread_names
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.own_process import facts

#: Programs, libraries and settings of the system and of NVIDIA's driver. Only these files of ``/etc`` are
#: readable, because it also holds keys and passwords.
SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/run/opengl-driver"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/os-release"),
    *("/etc/localtime", "/etc/timezone", "/etc/locale.alias", "/etc/locale.conf", "/etc/default/locale"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/etc/host.conf", "/etc/resolv.conf"),
    *("/etc/gai.conf", "/etc/protocols", "/etc/services", "/etc/mime.types", "/etc/fonts", "/etc/magic"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates", "/etc/pki/tls/certs"),
    *("/etc/pki/tls/cert.pem", "/etc/pki/ca-trust/extracted", "/etc/crypto-policies", "/etc/inputrc"),
    *("/etc/OpenCL", "/etc/vulkan", "/etc/glvnd", "/etc/nvidia", "/etc/nvidia-container-runtime"),
)
_STATE_OF_KERNEL: Final = ("/proc", "/sys")
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SHARED_MEMORY: Final = "/dev/shm"
_PATHS_OF_LIBRARIES: Final = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")

#: Variables of folders that libraries write into, and their places in the message's folder.
_OWN_FOLDERS: Final = MappingProxyType(
    {
        "HOME": "home",
        "TMPDIR": "tmp",
        "XDG_CACHE_HOME": "cache",
        "TRITON_CACHE_DIR": "cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    }
)
#: Variables that lead to other programs of the account.
_LEFT_OUT: Final = (
    *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "GPG_AGENT_INFO", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR"),
    *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "DOCKER_HOST"),
)

_NO_NAMES: Final = (
    "--confine: programs cannot name their threads on this host, so CUDA of NVIDIA's drivers from 570 on "
    'does not start (error 304). See docs/how-to/confine.md, "Names of threads"'
)

_CAPABILITIES_VERSION: Final = 0x20080522  # linux/capability.h
_DROP_FROM_BOUNDING_SET: Final = 24  # linux/prctl.h
_MOST_CAPABILITIES: Final = 64
#: Root keeps this capability, so it can still open other accounts' files that its rights include.
_KEPT_CAPABILITY: Final = 1  # CAP_DAC_OVERRIDE


@dataclass(frozen=True)
class Confinement:
    """The rights of a message's worker, besides the libraries of the system and the Python environment."""

    folder: str  # folder of this message alone, made by the caller, which the worker may write to
    read: tuple[str, ...] = ()  # readable files and folders: the app, and data that the operator names
    write: tuple[str, ...] = ()  # writable folders that the operator names
    ports: tuple[int, ...] = ()  # ports for TCP connections
    venv: str = ""  # virtual environment in `read`, whose packages must not be imported before

    def environment(self) -> dict[str, str]:
        """Return the environment variable that passes the confinement to a worker."""
        return {CONFINED_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Confinement | None:
        """Return this worker's confinement, or None."""
        if not (text := environ.get(CONFINED_VARIABLE)):
            return None
        fields = json.loads(text)
        read, write, ports = (tuple(fields[name]) for name in ("read", "write", "ports"))
        return cls(fields["folder"], read, write, ports, fields["venv"])

    def packages(self) -> list[str]:
        """Return the folders that come first on the worker's ``sys.path`` once it is confined."""
        return [interpreter.packages_of(self.venv)] if self.venv else []


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return True if this worker is confined, or should have been."""
    return facts.is_confined or bool(environ.get(CONFINED_VARIABLE))


def own_variables() -> frozenset[str]:
    """Return the variables that this module sets or removes in a confined worker."""
    if not facts.is_confined:
        return frozenset()
    return frozenset((*_OWN_FOLDERS, *_LEFT_OUT, "PATH", "VIRTUAL_ENV"))


def apply(environ: Mapping[str, str]) -> None:
    """Give up all rights that the caller has not granted, for this worker and its child processes.

    Raises ConfigError if the kernel cannot enforce this.
    """
    wanted = Confinement.from_environment(environ)
    # This worker inherited the confinement of the worker that has started it.
    if wanted is None and CONFINED_VARIABLE in environ:
        thread_names.be_readable()
    if wanted is None or facts.is_confined:
        return
    rights = dict(_rights(wanted, environ))
    try:
        _drop_capabilities()
        landlock.confine(rights, wanted.ports)
        listener = seccomp.confine(network=bool(wanted.ports), asks=True)
        if listener >= 0:
            thread_names.ask(wanted.folder, listener)
    except (landlock.LandlockUnavailableError, seccomp.SeccompUnavailableError) as error:
        raise ConfigError(f"--confine: {error}. The app was not run") from None
    except OSError as error:
        raise ConfigError(
            f"--confine: no process answers this worker ({error}). The app was not run"
        ) from None
    if sockets.has_proof():
        raise ConfigError(
            f"--confine: the app could open the state folder {path_text(state_folder.state_dir())}, which "
            "lies in a folder that it may read. Set FLOWER_GPU_STATE_DIR to another folder. "
            "The app was not run"
        )
    _make_own_folders(wanted)
    facts.is_confined = True
    if wanted.venv:
        interpreter.use_environment(wanted.venv)
    if device_files.granted(environ) and not thread_names.can_be_given():
        events.send("lacks", text=_NO_NAMES)


def _make_own_folders(confinement: Confinement) -> None:
    # Only a confined process may do this, because an earlier worker of the message may have left links to any
    # place in this folder.
    for variable, name in _OWN_FOLDERS.items():
        folder = Path(confinement.folder, name)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--confine: the app's own folders cannot be made: {error}") from None
        os.environ[variable] = str(folder)
    tempfile.tempdir = None  # A library may have made Python look up the old folder.
    for variable in _LEFT_OUT:
        os.environ.pop(variable, None)


def problem() -> str | None:
    """Return the reason why workers on this host cannot be confined; None if they can."""
    try:
        landlock.version()
        seccomp.check()
    except (landlock.LandlockUnavailableError, seccomp.SeccompUnavailableError) as error:
        return str(error)
    return None


def not_refused(*, with_ports: bool = False) -> list[str]:
    """Return the actions that this host's kernel cannot forbid, each with the version of Linux that can.

    ``with_ports``: True if apps may connect to some TCP port. Otherwise they cannot use TCP at all.
    """
    version = landlock.version()
    missing = {
        landlock.TRUNCATE_VERSION: "emptying files that it cannot open",
        landlock.SCOPES_VERSION: "signals to other processes, and abstract sockets of theirs",
    }
    if with_ports:
        missing[landlock.TCP_VERSION] = "TCP connections to other ports"
    return [
        f"{action} (Linux {landlock.KERNELS[needed]} or later)"
        for needed, action in sorted(missing.items())
        if version < needed
    ]


def program_paths(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders of this Python environment, and the search folders of libraries."""
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    yield from site.getsitepackages()
    if site.ENABLE_USER_SITE:
        yield site.getusersitepackages()
    yield from (path for path in sys.path if Path(path).is_absolute())
    for variable in _PATHS_OF_LIBRARIES:
        yield from (path for path in environ.get(variable, "").split(os.pathsep) if Path(path).is_absolute())


def _rights(confinement: Confinement, environ: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for path in (*SYSTEM, *program_paths(environ)):
        yield path, landlock.READ
    for path in _STATE_OF_KERNEL:
        yield path, landlock.LOOK
    gpus = device_files.granted(environ)
    for path in (*_DEVICES, *gpus):
        yield path, landlock.DEVICE
    if gpus and (pipes := mps_pipes(environ)):
        yield str(pipes), landlock.CHANGE  # existing pipes of the daemon, but no new files
    for path in confinement.read:
        yield path, landlock.READ
    own_sockets = state_folder.socket_folder()
    writable = (confinement.folder, *confinement.write, _SHARED_MEMORY)
    for path in (*writable, *([own_sockets] if own_sockets else [])):
        yield path, landlock.WRITE


def _drop_capabilities() -> None:
    """Give up all capabilities of root except CAP_DAC_OVERRIDE."""
    library = ctypes.CDLL(None, use_errno=True)
    for number in range(_MOST_CAPABILITIES):
        if number != _KEPT_CAPABILITY:
            library.prctl(_DROP_FROM_BOUNDING_SET, number, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    remaining = ctypes.create_string_buffer(24)
    library.capget(header, remaining)
    effective, permitted, _, *upper = struct.unpack("=6I", remaining.raw)
    kept = 1 << _KEPT_CAPABILITY
    if upper[:2] != [0, 0] or (effective | permitted) & ~kept:
        data = struct.pack("=6I", effective & kept, permitted & kept, 0, 0, 0, 0)
        if library.capset(header, data) != 0:
            error = ctypes.get_errno()
            raise seccomp.SeccompUnavailableError(f"capabilities cannot be given up ({os.strerror(error)})")
