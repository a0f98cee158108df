"""Key pairs of SuperNodes: made where they are missing, kept, in the form that Flower reads.

Flower knows a SuperNode by an EC key: ``flower-supernode`` is given the private one, in OpenSSH's format, and
``flwr supernode register`` the public one. Who has the private key is the node. So its file is its owner's
alone, and a key that others could have read or put there is refused.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.printable import account_name, path_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

#: Flower's option for the private key.
OPTION: Final = "--auth-supernode-private-key"

_MODE: Final = 0o600
_NAME: Final = "supernode-{number}"
# What Flower's SuperLink answers (flwr.supercore.error.catalog), and the SuperNode writes down.
_TURNED_AWAY: Final = "Failed to activate SuperNode."
# What `flwr supernode register` takes of the curves that OpenSSH's format has.
_CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True)
class NodeKey:
    """The key pair of one SuperNode."""

    #: File of the private key.
    private: Path
    #: The public key in one line, as OpenSSH writes it.
    public_text: str

    @property
    def public(self) -> Path:
        """File of the public key."""
        return _public_of(self.private)

    @property
    def options(self) -> tuple[str, ...]:
        """What ``flower-supernode`` is given."""
        return (OPTION, str(self.private))

    @property
    def register_command(self) -> str:
        """What the operator of the SuperLink runs once, so that this node is let in."""
        return f"flwr supernode register {path_text(self.public)}"

    @property
    def why_turned_away(self) -> str:
        """What it means that a SuperLink does not let this node in, and what to do."""
        return (
            "the SuperLink was not told of its key, or takes it for connected still, as for up to two "
            "minutes after a SuperNode was killed. If the key is new, its operator runs: "
            f"{self.register_command}"
        )


def is_turned_away(log: str) -> bool:
    """Tell by the end of a SuperNode's log whether it ended because the SuperLink does not let it in."""
    return _TURNED_AWAY in log.rpartition("\n$ ")[2]  # each start writes such a line


def node_keys(folder: Path, count: int) -> list[NodeKey]:
    """Return the keys of this many SuperNodes; those that are missing are made.

    ``folder``: where the keys are: ``supernode-0`` with the private key of the first one, ``supernode-0.pub``
    with its public key, and so on. It is made if it is missing.
    ``count``: how many keys.
    Returns the keys in order.
    Raises ConfigError if the folder or a key in it cannot be used.
    """
    folder = folder.absolute()
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        _check_folder(folder)
        return [_node_key(folder / _NAME.format(number=number)) for number in range(count)]
    except OSError as error:
        where = path_text(Path(error.filename) if error.filename else folder)
        raise ConfigError(
            f"--keys {path_text(folder)}: {where}: {error.strerror}. Give a folder that this account can "
            "write to"
        ) from None


def _check_folder(folder: Path) -> None:
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"--keys {path_text(folder)} is not a folder: give one, or a path where one can be made"
        )
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"--keys {path_text(folder)} belongs to {account_name(found.st_uid)}, who could put other keys "
            "there: give a folder of this account"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"--keys {path_text(folder)} can be written to by other accounts, who could put other keys "
            f"there: chmod go-w {path_text(folder)}"
        )


def _node_key(private: Path) -> NodeKey:
    if not os.path.lexists(private):
        _make(private)
    text = _public_text(_load(private))
    key = NodeKey(private, text)
    if not key.public.exists() or key.public.read_text(errors="replace").split()[:2] != text.split()[:2]:
        with files.replaced(key.public, mode=0o644) as new:
            new.write_text(f"{text}\n", encoding="ascii")
    return key


def _make(private: Path) -> None:
    from cryptography.hazmat.primitives import serialization  # it takes a while, and --help does without
    from cryptography.hazmat.primitives.asymmetric import ec

    text = ec.generate_private_key(ec.SECP384R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    # Under its name there is never a part of a key, and a key of another process that makes one now is kept.
    new = private.with_name(f".{private.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(new, "xb", opener=partial(os.open, mode=_MODE)) as file:
            file.write(text)
        new.chmod(_MODE)  # also with a umask that forbids the owner something
        with suppress(FileExistsError):
            os.link(new, private)
    finally:
        new.unlink(missing_ok=True)


def _load(private: Path) -> EllipticCurvePrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    name = path_text(private)
    otherwise = f"or move {name} away, and a new one is made, which the SuperLink has to be told of"
    _check_file(private)
    try:
        key = load_ssh_private_key(private.read_bytes(), None)
    except TypeError:  # what it raises where a password is missing
        raise ConfigError(
            f"{name} is protected by a password, which flower-supernode cannot ask for: "
            f"ssh-keygen -p -N '' -f {name}, {otherwise}"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{name} is no private key in OpenSSH's format, which flower-supernode reads: put one there, "
            f"{otherwise}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        kind = key.curve.name if isinstance(key, ec.EllipticCurvePrivateKey) else type(key).__name__
        raise ConfigError(
            f"{name} is a key of another kind ({kind}), and Flower takes EC keys only: put one there that "
            f"ssh-keygen -t ecdsa -b 384 makes, {otherwise}"
        )
    return key


def _check_file(private: Path) -> None:
    found = private.stat()
    name = path_text(private)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{name} is not a file: move it away, and a key is made")
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{name} belongs to {account_name(found.st_uid)}, and a key must be of the account that uses it: "
            "chown it, or move it away, and a new one is made"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{name} can be used by other accounts (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"chmod 600 {name}. Where they may have read it, move it away and register the new one"
        )


def _public_text(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives import serialization

    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode("ascii")


def _public_of(private: Path) -> Path:
    return private.with_name(f"{private.name}.pub")
