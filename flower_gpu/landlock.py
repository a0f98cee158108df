"""Landlock: a process gives up rights for good, with all its children. Root is not needed.

The rules are those of a process tree, and no program can take them back. The kernel's side is described in
landlock(7) and in its file Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from types import MappingProxyType
from typing import Final

# asm-generic/unistd.h: the same numbers on all architectures.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446

# linux/landlock.h
_VERSION: Final = 1  # flag of landlock_create_ruleset
_PATH_BENEATH: Final = 1  # types of rules
_NET_PORT: Final = 2
_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_FOLDER: Final = 1 << 3
_REMOVE: Final = 1 << 4 | 1 << 5  # folders and files
_MAKE_CHAR: Final = 1 << 6
_MAKE: Final = 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12  # folders, files, sockets, pipes, links
_MAKE_BLOCK: Final = 1 << 11
_REFER: Final = 1 << 13  # version 2, Linux 5.19
_TRUNCATE: Final = 1 << 14  # version 3, Linux 6.2
_IOCTL_DEV: Final = 1 << 15  # version 5
_IOCTL_VERSION: Final = 5  # Linux 6.10
_BIND_TCP: Final = 1 << 0
_CONNECT_TCP: Final = 1 << 1
_SCOPES: Final = 1 << 0 | 1 << 1  # abstract Unix sockets and signals

#: The versions with which a process gives up more than files, and their kernels.
TRUNCATE_VERSION: Final = 3
TCP_VERSION: Final = 4
SCOPES_VERSION: Final = 6
KERNELS: Final = MappingProxyType({TRUNCATE_VERSION: "6.2", TCP_VERSION: "6.7", SCOPES_VERSION: "6.12"})

#: Rights to files and folders, for :func:`confine`.
LOOK: Final = _READ_FILE | _READ_FOLDER
READ: Final = LOOK | _EXECUTE
CHANGE: Final = LOOK | _WRITE_FILE
WRITE: Final = READ | _WRITE_FILE | _REMOVE | _MAKE | _REFER | _TRUNCATE
DEVICE: Final = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
_OF_A_FILE: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_SET_NO_NEW_PRIVS: Final = 38  # linux/prctl.h

#: Whether this process has set ``no_new_privs`` itself, for its rules; a fork inherits both.
has_set_no_new_privs = False

#: The first version whose rules leave renames and links between folders alone, and its kernel.
LEAST_VERSION: Final = 2
_LEAST_KERNEL: Final = "5.19"


class LandlockUnavailableError(Exception):
    """The kernel lets this process give nothing up. The text says why, in words."""


def version() -> int:
    """Return the version of Landlock that the kernel has.

    Raises LandlockUnavailableError if it has none, or one with which programs would not find everything else
    as before.
    """
    try:
        found = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise LandlockUnavailableError(
                "Landlock is not among the kernel's security modules (lsm=)"
            ) from None
        if error.errno == errno.EPERM:
            raise LandlockUnavailableError("the container forbids Landlock (seccomp)") from None
        raise LandlockUnavailableError(f"the kernel has no Landlock ({error.strerror})") from None
    except AttributeError:
        raise LandlockUnavailableError("there is no Landlock outside of Linux") from None
    if found < LEAST_VERSION:
        raise LandlockUnavailableError(
            f"Landlock {found} keeps programs from moving files between folders; "
            f"Linux {_LEAST_KERNEL} or later does not"
        )
    return found


class Ruleset:
    """What a process is about to give up. The kernel holds it under a descriptor.

    Whoever has the descriptor can allow more: it is to be closed before other people's code runs. What the
    kernel's version does not know is left out.

    ``files``: rights to files and folders, given up everywhere but where :meth:`allow` gives them back.
    ``tcp``: the same for TCP ports.
    ``scopes``: what is given up towards processes outside: signals, abstract sockets.

    Raises LandlockUnavailableError if the kernel cannot do that.
    """

    def __init__(self, files: int, *, tcp: int = 0, scopes: int = 0) -> None:
        found = version()
        files &= ~(0 if found >= TRUNCATE_VERSION else _TRUNCATE)
        self._files = files & ~(0 if found >= _IOCTL_VERSION else _IOCTL_DEV)
        self._tcp = tcp if found >= TCP_VERSION else 0
        handled = struct.pack("=QQQ", self._files, self._tcp, scopes if found >= SCOPES_VERSION else 0)
        with _explained():
            self._descriptor = _call(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)

    def allow(self, path: str, rights: int, flags: int = os.O_NOFOLLOW) -> None:
        """Give rights to a file, or to a folder with all below it, back; nothing happens if there is none.

        ``flags``: 0 if it may be a symbolic link.
        """
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # gone meanwhile, or nobody's business here
        rights &= self._files
        try:
            try:
                self._add_path(rights, file)
            except OSError as error:
                # The kernel's answer to rights that only folders have, for a file. Asked by ``fstat``, a dead
                # network disk would keep the worker waiting for ever.
                if error.errno != errno.EINVAL or not rights & _OF_A_FILE:
                    raise
                self._add_path(rights & _OF_A_FILE, file)
        finally:
            os.close(file)

    def _add_path(self, rights: int, file: int) -> None:
        _call(_ADD_RULE, self._descriptor, _PATH_BENEATH, struct.pack("=Qi", rights, file), 0)

    def allow_beside(
        self, paths: Collection[str], above: Container[str], rights: int, folder: str = "/"
    ) -> None:
        """Give rights to all in a folder back, but to these paths, which are in the folders ``above``."""
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.path in paths or entry.is_symlink():  # what a link leads to has its own rule
                    continue
                if entry.path in above:
                    self.allow_beside(paths, above, rights, entry.path)
                else:
                    self.allow(entry.path, rights)

    def allow_connect(self, port: int) -> None:
        """Give the right to connect to a TCP port, on any host, back."""
        if self._tcp:
            _call(_ADD_RULE, self._descriptor, _NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)

    def restrict_self(self) -> None:
        """Restrict this process, and all that it starts, for good.

        Without the right to administer the system this sets ``no_new_privs``: programs with a setuid bit run
        as the user who starts them.

        Raises LandlockUnavailableError if the kernel cannot do that, or this process has other threads: they
        would stay as they are.
        """
        if (threads := sum(1 for _ in os.scandir("/proc/self/task"))) > 1:
            count = "another thread" if threads == 2 else f"{threads - 1} other threads"
            raise LandlockUnavailableError(f"{count} ran before the process could be restricted")
        with _explained():
            try:
                _call(_RESTRICT_SELF, self._descriptor, 0)
            except OSError as error:
                if error.errno != errno.EPERM:
                    raise
                _library().prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                _call(_RESTRICT_SELF, self._descriptor, 0)
                global has_set_no_new_privs
                has_set_no_new_privs = True

    def close(self) -> None:
        """Close the ruleset; restricted processes stay restricted."""
        os.close(self._descriptor)


@contextmanager
def without(paths: Collection[str], but: Collection[str] = ()) -> Iterator[Ruleset]:
    """Yield rules for giving up these files and all below them, and making device files anywhere.

    Other files are opened, made, moved and removed as before. So are new ones, but for those that come later
    into a folder that holds one of ``paths``, or into one above it.

    ``paths``: absolute, without symbolic links in them.
    ``but``: files among them that stay. Those that do not exist are left out.

    Raises LandlockUnavailableError if the kernel cannot do that.
    """
    above = set()
    for path in paths:
        while (parent := os.path.dirname(path)) != path:  # noqa: PTH120 - each worker does it
            above.add(path := parent)
    with closing(Ruleset(DEVICE | _MAKE_CHAR | _MAKE_BLOCK | _REFER)) as rules:
        with _explained():
            rules.allow_beside(frozenset(paths), above, DEVICE)
            for path in but:
                rules.allow(path, DEVICE)
            rules.allow("/", _REFER)
        yield rules


def confine(rights: Mapping[str, int], ports: Iterable[int] = ()) -> None:
    """Give up all files but these, TCP, and signals and abstract sockets of processes outside of this one.

    What the kernel's :func:`version` does not know stays as it is. Files are met by their names now: those
    that are made later in one of these folders can be opened, too. An account without rights gives up
    programs with a setuid bit.

    ``rights``: :data:`LOOK`, :data:`READ`, :data:`CHANGE`, :data:`WRITE` or :data:`DEVICE` by the path of a
    file, or of a folder with all below it. Links are followed. Those that do not exist are left out.
    ``ports``: TCP ports to which it can connect, on any host.

    Raises LandlockUnavailableError if the kernel cannot do that.
    """
    files = WRITE | _MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV
    with closing(Ruleset(files, tcp=_BIND_TCP | _CONNECT_TCP, scopes=_SCOPES)) as rules, _explained():
        for path, wanted in rights.items():
            rules.allow(path, wanted, flags=0)
        for port in ports:
            rules.allow_connect(port)
        rules.restrict_self()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LandlockUnavailableError(f"the kernel refuses Landlock's rules ({error.strerror})") from error


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # once: it takes longer than the call of the kernel


def _call(number: int, *args: object) -> int:
    found: int = _library().syscall(number, *args)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
