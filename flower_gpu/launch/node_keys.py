"""Key pairs of SuperNodes, in files that Flower can read. Missing keys are created.

Flower identifies a SuperNode by an EC key. ``flower-supernode`` gets the private key in OpenSSH's format, and
``flwr supernode register`` gets the public key. Any process with the private key can act as the node. So only
the owner may read its file, and a key that others could have read or written is refused.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text

#: Flower's option for the private key.
OPTION: Final = "--auth-supernode-private-key"

# Answer of Flower's SuperLink (flwr.supercore.error.catalog), which the SuperNode logs.
_TURNED_AWAY: Final = "Failed to activate SuperNode."
# Curves that both OpenSSH's format and `flwr supernode register` support.
_CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True)
class NodeKey:
    """The key pair of one SuperNode."""

    private: Path  # file of the private key
    public_text: str  # public key as one line, in OpenSSH's format

    @property
    def public(self) -> Path:
        """File of the public key: that of the private key with ``.pub`` at the end of its name."""
        return self.private.with_name(f"{self.private.name}.pub")

    @property
    def register_command(self) -> str:
        """Command with which the operator of the SuperLink registers this node once."""
        return f"flwr supernode register {path_text(self.public)}"

    @property
    def why_turned_away(self) -> str:
        """Likely reason why a SuperLink refuses this node, and a solution."""
        return (
            "the SuperLink does not know its key, or still counts it as connected, as for up to two "
            "minutes after a SuperNode was killed. If the key is new, the SuperLink's operator runs: "
            f"{self.register_command}"
        )


def is_turned_away(log: str) -> bool:
    """Return True if a SuperNode exited because the SuperLink refused it, according to the end of its log."""
    # Each start writes a line that begins with "$ " to the log.
    return _TURNED_AWAY in log.rpartition("\n$ ")[2]


def node_keys(folder: Path, count: int) -> list[NodeKey]:
    """Return the keys of ``count`` SuperNodes, in order. Creates missing keys.

    ``folder``: folder of the keys, created if it is missing. The first private key is in ``supernode-0``, its
    public key in ``supernode-0.pub``, and so on.

    Raises ConfigError if the folder or a key in it cannot be used.
    """
    folder = folder.absolute()
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        if not files.is_own_folder(folder.resolve()):
            raise ConfigError(
                f"--keys {path_text(folder)} must be a folder of this account that no other account can "
                f"write to, or others could put their keys there: chmod go-w, or another folder"
            )
        with _locked(folder):
            return [_node_key(folder / f"supernode-{number}") for number in range(count)]
    except OSError as error:
        where = path_text(Path(error.filename) if error.filename else folder)
        raise ConfigError(
            f"--keys {path_text(folder)}: {where}: {error.strerror}. Give a folder that this account can "
            "write to"
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commands from creating the same keys within the block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _node_key(private: Path) -> NodeKey:
    if not os.path.lexists(private):
        _make(private)
    text = _public_text(private)
    key = NodeKey(private, text)
    if not key.public.exists() or key.public.read_text(errors="replace").split()[:2] != text.split()[:2]:
        with files.replaced(key.public, mode=0o644) as new:
            new.write_text(f"{text}\n", encoding="ascii")
    return key


def _make(private: Path) -> None:
    # Imported late, because it takes long, and --help does not need it.
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    text = ec.generate_private_key(ec.SECP384R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    with files.replaced(private, mode=0o600) as new:
        new.write_bytes(text)


def _public_text(private: Path) -> str:
    """Return the public key that belongs to the private key in a file."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    name = path_text(private)
    otherwise = "Or move it away: then a new one is made, which has to be registered at the SuperLink"
    status = private.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{name} must be a file of this account that no other account can read or change (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): chmod 600 {name}. {otherwise}, if others may have read it"
        )
    try:
        key = serialization.load_ssh_private_key(private.read_bytes(), None)
    except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: a password is missing
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise ConfigError(
            f"{name} is not an EC key in OpenSSH's format without a password. Flower takes no other: make "
            f"one with `ssh-keygen -t ecdsa -b 384 -N ''`. {otherwise}"
        )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode("ascii")
