"""``flower-gpu supernode --confine``: the parts of a host that the apps of a SuperNode may use.

The operator's word travels to the processes of messages in a variable. There each message gets a folder, and
the app is held to it all in its worker (:mod:`flower_gpu.workers.confinement`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.gpu.nvidia import mps_pipes
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.options import CONFINE_VARIABLE, ENVIRONMENTS_DIR
from flower_gpu.printable import path_text
from flower_gpu.workers import confinement, state_folder, thread_names
from flower_gpu.workers.confinement import Confinement

_PARENT: Final = "confined"  # in the state folder

#: Accesses that no kernel denies to a confined app, in words.
NEVER: Final = (
    "connecting to Unix sockets that have a path: docker.sock, a session bus, an ssh-agent",
    "reading, changing and leaving files in /dev/shm, also those of other programs of this account",
    "names, sizes and dates of files anywhere, and command lines of other processes",
    "setting the dates of this account's files to now",
    "use of cores, GPUs, main memory and disk space: limit it with cgroups and quotas",
)
#: Further accesses if a port is allowed.
WITH_PORTS: Final = (
    "UDP, by which host names are looked up",
    "accepting TCP connections on a port that the kernel chooses",
)


@dataclass(frozen=True)
class Allowed:
    """The operator's permissions for the apps of a SuperNode."""

    read: tuple[str, ...] = ()  # --data-dir
    write: tuple[str, ...] = ()  # --write-dir
    ports: tuple[int, ...] = ()  # --allow-connect

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the processes of messages."""
        return {CONFINE_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Allowed | None:
        """Return the allowed folders and ports, or None if apps are not confined."""
        if not (text := environ.get(CONFINE_VARIABLE)):
            return None
        fields = json.loads(text)
        return cls(*(tuple(fields[name]) for name in ("read", "write", "ports")))

    def check(self, keys: Iterable[str], environ: Mapping[str, str]) -> None:
        """Refuse folders that would give an app access to secrets or programs.

        ``keys``: secret files of the SuperNode.
        ``environ``: environment of the SuperNode.
        Raises ConfigError for such a folder, and for a missing folder.
        """
        for option, named in (("--data-dir", self.read), ("--write-dir", self.write)):
            for path in named:
                if not Path(path).is_dir():
                    raise ConfigError(f"{option} {path_text(path)}: there is no such folder")
        secrets = dict(_secrets(keys, environ))
        programs = list(confinement.program_paths(environ))
        pipes = [str(folder)] if (folder := mps_pipes(environ)) else []
        for path in (*self.read, *self.write, *programs, *pipes):
            for secret, what in secrets.items():
                if _is_in(secret, path) or (what == _OURS and _is_in(path, secret)):
                    raise ConfigError(
                        f"--confine: apps could open {path_text(path)}, and with it {path_text(secret)}, "
                        f"{what}. {self._instead(path)}"
                    )
        for path in self.write:
            for place in (*confinement.SYSTEM, *programs):
                if _is_in(place, path) or _is_in(path, place):
                    raise ConfigError(
                        f"--write-dir {path_text(path)}: apps could change programs or libraries in "
                        f"{path_text(place)}, which others run, too. Name another folder"
                    )
            for option, named in (("--data-dir", self.read), ("--write-dir", self.write)):
                for inner in named:
                    if any(_is_in(str(folder), path) for folder in Path(inner).parents):
                        raise ConfigError(
                            f"{option} {path_text(inner)} is within --write-dir {path_text(path)}, where an "
                            "app could put a link to anything in its place. Leave it out: apps can read and "
                            "write there anyway"
                        )

    def _instead(self, path: str) -> str:
        if path in (*self.read, *self.write):
            return "Name a folder that holds data alone"
        return (
            "Python or the loader look for libraries there (PYTHONPATH, LD_LIBRARY_PATH, CUDA_HOME, or the "
            "working folder under python -m), or CUDA for an MPS daemon (CUDA_MPS_PIPE_DIRECTORY). Remove "
            "it from the variable and install its packages, or name a folder that holds data alone"
        )


_OURS: Final = "flower-gpu's own files of this account"


def _secrets(keys: Iterable[str], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield str(state_folder.state_dir()), _OURS
    yield str(LedgerFolder.find().own_folder()), "the ledger of leases"
    if environ.get(str(ENVIRONMENTS_DIR.variable)):
        yield environ[str(ENVIRONMENTS_DIR.variable)], "the packages of other apps"
    home = environ.get("HOME") or str(Path("~").expanduser())
    yield environ.get("FLWR_HOME") or f"{home}/.flwr", "Flower's files of this account"
    for name in (".ssh", ".gnupg", ".aws", ".kube", ".docker", ".config", ".netrc"):
        yield f"{home}/{name}", "where keys and passwords are kept"
    for path in keys:
        yield str(Path(path).absolute()), "a key of the SuperNode"


def _is_in(path: str, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def not_enforced(allowed: Allowed) -> list[str]:
    """Return the gaps of the confinement on this host."""
    missing = confinement.not_refused(with_ports=bool(allowed.ports))
    if pipes := mps_pipes(os.environ):
        missing.append(f"errors on a GPU for all clients of the MPS daemon in {path_text(pipes)}")
    return [*missing, *(WITH_PORTS if allowed.ports else ()), *NEVER]


@contextmanager
def for_message(allowed: Allowed, app: Sequence[str], environment: str = "") -> Iterator[Confinement]:
    """Create a folder for a message, and remove it after the block.

    ``allowed``: permissions from the operator.
    ``app``: files and folders of the app.
    ``environment``: virtual environment with the app's declared packages.
    Raises ConfigError if the folder cannot be created.
    """
    try:
        parent = state_folder.made_state_dir() / _PARENT
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        files.remove_unlocked_folders(list(parent.iterdir()))
        path = parent / f"{os.getpid()}-{os.urandom(6).hex()}"
        lock = files.locked_folder(path)
    except OSError as error:
        raise ConfigError(f"no folder can be made for a message: {error}") from error
    try:
        with thread_names.provided(path):
            read = tuple(filter(None, (*app, environment, *allowed.read)))
            yield Confinement(str(path), read, allowed.write, allowed.ports, environment)
    finally:
        with suppress(OSError, RecursionError):
            files.remove(path)
        os.close(lock)
