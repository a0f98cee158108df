"""The keys and certificates of one run of ``flower-gpu launch --secure``, and the folder that they are in.

The folder is in the state folder, with mode 0700, and goes with the run: the launcher removes it, or, where
the launcher was killed, the guard beside it (``guard.py``). Where both were killed at once, the next
``launch --secure`` removes it: it is locked by no process then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.flower import mutual_tls
from flower_gpu.launch.authority import Authority
from flower_gpu.launch.node_keys import NodeKey, keys_in
from flower_gpu.workers import state_folder

_PARENT: Final = "run-keys"


@dataclass(frozen=True)
class RunKeys:
    """What each part of one run shows the others, and what it asks of them."""

    folder: Path
    #: By which the SuperLink knows the SuperNodes, by client.
    nodes: tuple[NodeKey, ...]

    @property
    def superlink(self) -> mutual_tls.Identity:
        """Of the SuperLink, its SuperExec and the ServerApp."""
        return self._identity("superlink")

    @property
    def operator(self) -> mutual_tls.Identity:
        """Of the launcher, and of ``flwr`` as the launcher starts it."""
        return self._identity("operator")

    def supernode(self, client: int) -> mutual_tls.Identity:
        """Of a SuperNode, its SuperExec and its ClientApps."""
        return self._identity(f"supernode-{client}")

    def _identity(self, part: str) -> mutual_tls.Identity:
        return mutual_tls.Identity(self.folder / f"{part}.pem")

    @classmethod
    def _make(cls, folder: Path, clients: int) -> RunKeys:
        (folder / "nodes").mkdir(mode=0o700)
        keys = cls(folder, tuple(keys_in(folder / "nodes", clients)))
        keys._write()
        return keys

    def _write(self) -> None:
        authority = Authority()
        identities = (self.superlink, self.operator, *map(self.supernode, range(len(self.nodes))))
        self.superlink.authority.write_bytes(authority.certificate)
        for identity in identities:
            descriptor = files.opened(identity.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(os.dup(descriptor), "wb") as file:
                file.write(authority.issue(identity.path.stem))
            descriptor.close()


@contextmanager
def made_for_run(clients: int) -> Iterator[RunKeys]:
    """Make all keys and certificates of a run with this many SuperNodes; remove them after the block.

    Raises
    ------
    ConfigError
        If there is no folder for them.
    """
    with ExitStack() as stack:
        try:
            parent = state_folder.made_state_dir() / _PARENT
            with suppress(FileExistsError):
                parent.mkdir(mode=0o700)
            # Of runs that were killed, with all that could have removed them.
            files.remove_unlocked_folders(list(parent.iterdir()))
            folder, lock = _locked_folder(parent)
            stack.callback(lock.close)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            keys = RunKeys._make(folder, clients)
        except OSError as error:
            raise ConfigError(
                f"--secure cannot write the keys of the run: {error}. Set FLOWER_GPU_STATE_DIR to a folder "
                "of this account on a disk that is not full"
            ) from error
        yield keys


def _locked_folder(parent: Path) -> tuple[Path, files.Descriptor]:
    """Make a folder and lock it."""
    while True:
        path = parent / f"{os.getpid()}-{os.urandom(4).hex()}"
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # removed by another run before it was locked
            descriptor = files.opened(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if files.still_has_name(descriptor, path):
                return path, descriptor
            descriptor.close()
