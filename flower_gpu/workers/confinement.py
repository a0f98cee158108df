"""Confinement: a worker gives up all of this host that the app of a message does not need.

The caller says what that is (:class:`Confinement`, in a variable of the worker's environment). The worker
gives up the rest before any code of the app is imported (:func:`apply`), by Landlock and seccomp. The kernel
holds it to that, with all that it starts.
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
from flower_gpu.gpu import guard
from flower_gpu.gpu.gpus import mps_pipes
from flower_gpu.options import CONFINED_VARIABLE
from flower_gpu.printable import path_text
from flower_gpu.workers import events, interpreter, state_folder, thread_names
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.own_process import facts

#: Programs, libraries and their settings, of the system and of NVIDIA's driver. Of ``/etc`` only these: it
#: holds keys and passwords, too.
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

#: Folders that libraries write into, below the message's own.
_OWN_FOLDERS: Final = MappingProxyType(
    {
        "HOME": "home",
        "TMPDIR": "tmp",
        "XDG_CACHE_HOME": "cache",
        "TRITON_CACHE_DIR": "cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    }
)
#: What leads to other programs of the account.
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
#: Root goes on opening what belongs to others, where it can be opened at all.
_KEPT_CAPABILITY: Final = 1  # CAP_DAC_OVERRIDE


@dataclass(frozen=True)
class Confinement:
    """What the worker of a message keeps besides the libraries of the system and the Python environment."""

    folder: str  # of this message alone, and made by the caller: the one place where it writes
    read: tuple[str, ...] = ()  # files and folders: the app's own, and data that the operator names
    write: tuple[str, ...] = ()  # folders that the operator names
    ports: tuple[int, ...] = ()  # to which it can connect by TCP
    venv: str = ""  # a virtual environment in `read`: its packages must not be imported before

    def environment(self) -> dict[str, str]:
        """Return what tells a worker."""
        return {CONFINED_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Confinement | None:
        """Return this worker's confinement, or None."""
        if not (text := environ.get(CONFINED_VARIABLE)):
            return None
        told = json.loads(text)
        read, write, ports = (tuple(told[name]) for name in ("read", "write", "ports"))
        return cls(told["folder"], read, write, ports, told["venv"])

    def packages(self) -> list[str]:
        """Return what comes first on its ``sys.path`` once it is confined."""
        return [interpreter.packages_of(self.venv)] if self.venv else []


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Tell whether this worker is confined, or should have been."""
    return facts.confinement is not None or bool(environ.get(CONFINED_VARIABLE))


def own_variables() -> frozenset[str]:
    """Return the variables that are set and removed here for a worker that is confined."""
    if facts.confinement is None:
        return frozenset()
    return frozenset((*_OWN_FOLDERS, *_LEFT_OUT, "PATH", "VIRTUAL_ENV"))


def apply(environ: Mapping[str, str]) -> None:
    """Give up, for this worker and its children, all that the caller has not allowed.

    Raises ConfigError if the kernel cannot do that.
    """
    told = Confinement.from_environment(environ)
    if told is None and CONFINED_VARIABLE in environ:  # as the worker that has started this one
        thread_names.be_readable()
    if told is None or facts.confinement is not None:
        return
    rights = dict(_rights(told, environ))
    try:
        _drop_capabilities()
        landlock.confine(rights, told.ports)
        listener = seccomp.confine(network=bool(told.ports), asks=True)
        if listener >= 0:
            thread_names.ask(told.folder, listener)
    except (landlock.LandlockUnavailableError, seccomp.SeccompUnavailableError) as error:
        raise ConfigError(f"--confine: {error}. The app was not run") from None
    except OSError as error:
        raise ConfigError(f"--confine: nobody answers this worker ({error}). The app was not run") from None
    if sockets.has_proof():
        raise ConfigError(
            f"--confine: the app could open the state folder {path_text(state_folder.state_dir())}, which "
            "lies in a folder that it may read. Set FLOWER_GPU_STATE_DIR to another folder. "
            "The app was not run"
        )
    _move_in(told)
    facts.confinement = told
    if told.venv:
        interpreter.use_environment(told.venv)
    if guard.granted(environ) and not thread_names.can_be_given():
        events.send("lacks", text=_NO_NAMES)


def _move_in(told: Confinement) -> None:
    # By a process that is confined: an earlier worker of the message may have left links to anywhere here.
    for variable, name in _OWN_FOLDERS.items():
        folder = Path(told.folder, name)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--confine: the app's own folders cannot be made: {error}") from None
        os.environ[variable] = str(folder)
    tempfile.tempdir = None  # as a library may have found it
    for variable in _LEFT_OUT:
        os.environ.pop(variable, None)


def problem() -> str | None:
    """Return why workers of this host cannot be confined at all; None where they can."""
    try:
        landlock.version()
        seccomp.check()
    except (landlock.LandlockUnavailableError, seccomp.SeccompUnavailableError) as error:
        return str(error)
    return None


def not_refused(*, with_ports: bool = False) -> list[str]:
    """Return the gaps of this host's kernel in words, each with the version of Linux that closes it.

    ``with_ports``: whether there is a TCP port to which apps can connect. Without one they have no TCP at
    all.
    """
    found = landlock.version()
    missing = {
        landlock.TRUNCATE_VERSION: "emptying files that it cannot open",
        landlock.SCOPES_VERSION: "signals to other processes, and abstract sockets of theirs",
    }
    if with_ports:
        missing[landlock.TCP_VERSION] = "TCP connections to other ports"
    return [
        f"{what} (Linux {landlock.KERNELS[least]} or later)"
        for least, what in sorted(missing.items())
        if found < least
    ]


def program_paths(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders of this Python environment, and those where libraries are looked for."""
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    yield from site.getsitepackages()
    if site.ENABLE_USER_SITE:
        yield site.getusersitepackages()
    yield from (path for path in sys.path if Path(path).is_absolute())
    for variable in _PATHS_OF_LIBRARIES:
        yield from (path for path in environ.get(variable, "").split(os.pathsep) if Path(path).is_absolute())


def _rights(told: Confinement, environ: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for path in (*SYSTEM, *program_paths(environ)):
        yield path, landlock.READ
    for path in _STATE_OF_KERNEL:
        yield path, landlock.LOOK
    gpus = guard.granted(environ)
    for path in (*_DEVICES, *gpus):
        yield path, landlock.DEVICE
    if gpus and (pipes := mps_pipes(environ)):
        yield str(pipes), landlock.CHANGE  # what the daemon has made there, and nothing new
    for path in told.read:
        yield path, landlock.READ
    own_sockets = state_folder.socket_folder()
    for path in (told.folder, *told.write, _SHARED_MEMORY, *([own_sockets] if own_sockets else [])):
        yield path, landlock.WRITE


def _drop_capabilities() -> None:
    """Give up all capabilities of root but those of a file's owner."""
    library = ctypes.CDLL(None, use_errno=True)
    for number in range(_MOST_CAPABILITIES):
        if number != _KEPT_CAPABILITY:
            library.prctl(_DROP_FROM_BOUNDING_SET, number, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    left = ctypes.create_string_buffer(24)
    library.capget(header, left)
    effective, permitted, _, *upper = struct.unpack("=6I", left.raw)
    kept = 1 << _KEPT_CAPABILITY
    if upper[:2] != [0, 0] or (effective | permitted) & ~kept:
        data = struct.pack("=6I", effective & kept, permitted & kept, 0, 0, 0, 0)
        if library.capset(header, data) != 0:
            error = ctypes.get_errno()
            raise seccomp.SeccompUnavailableError(f"capabilities cannot be given up ({os.strerror(error)})")
