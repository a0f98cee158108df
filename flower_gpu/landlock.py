"""Landlock: a Linux process restricts itself and all its future children. It does not need root for this.

First, the process creates a ruleset with the rights to give up. Then it adds rules for the files and ports
that it may still use, and applies the ruleset. After that, no program can remove the restriction. landlock(7)
and the kernel's Documentation/userspace-api/landlock.rst describe the interface.
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
_VERSION: Final = 1  # flag of landlock_create_ruleset that asks for the version
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
_REFER: Final = 1 << 13  # move or link files between folders; since version 2, Linux 5.19
_TRUNCATE: Final = 1 << 14  # since version 3, Linux 6.2
_IOCTL_DEV: Final = 1 << 15  # since version 5
_IOCTL_VERSION: Final = 5  # Linux 6.10
_BIND_TCP: Final = 1 << 0
_CONNECT_TCP: Final = 1 << 1
_SCOPES: Final = 1 << 0 | 1 << 1  # abstract Unix sockets and signals

#: The versions that can restrict more than the version before, and the first kernel with each.
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

#: True if this process has set ``no_new_privs`` to apply a ruleset. A fork inherits the setting and this
#: value.
has_set_no_new_privs = False

#: The first version that can allow moving and linking files between folders. Version 1 always denies that.
LEAST_VERSION: Final = 2
_LEAST_KERNEL: Final = "5.19"


class LandlockUnavailableError(Exception):
    """The kernel cannot restrict this process. The text gives the reason."""


def version() -> int:
    """Return the kernel's version of Landlock.

    Raises LandlockUnavailableError if the kernel has no Landlock, or only version 1. Version 1 would also
    deny moving files between folders.
    """
    try:
        supported = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
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
    if supported < LEAST_VERSION:
        raise LandlockUnavailableError(
            f"Landlock {supported} keeps programs from moving files between folders; "
            f"use Linux {_LEAST_KERNEL} or later"
        )
    return supported


class Ruleset:
    """The rights that a process is about to give up: a ruleset of the kernel, open under a descriptor.

    Code with the descriptor can still add exceptions, so close the ruleset before the user's code runs. If
    the kernel's version does not know a right, the process keeps that right.

    ``files``: rights to files and folders to give up, except where :meth:`allow` keeps them.
    ``tcp``: rights to TCP ports to give up, except where :meth:`allow_connect` keeps them.
    ``scopes``: bits for signals and for abstract Unix sockets. With a bit, the process can no longer send
    signals to processes outside the restriction, or connect to their sockets.

    Raises LandlockUnavailableError if the kernel cannot create the ruleset.
    """

    def __init__(self, files: int, *, tcp: int = 0, scopes: int = 0) -> None:
        supported = version()
        files &= ~(0 if supported >= TRUNCATE_VERSION else _TRUNCATE)
        self._files = files & ~(0 if supported >= _IOCTL_VERSION else _IOCTL_DEV)
        self._tcp = tcp if supported >= TCP_VERSION else 0
        handled = struct.pack("=QQQ", self._files, self._tcp, scopes if supported >= SCOPES_VERSION else 0)
        with _explained():
            self._descriptor = _call(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)

    def allow(self, path: str, rights: int, flags: int = os.O_NOFOLLOW) -> None:
        """Keep rights to a file, or to a folder and everything below it.

        A path that is missing, or that this process may not look up, is ignored.

        ``flags``: 0 to follow a symbolic link at the end of the path.
        """
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        rights &= self._files
        try:
            try:
                self._add_path(rights, file)
            except OSError as error:
                # EINVAL means that the path is a file but some rights apply only to folders. ``fstat`` could
                # find that out in advance, but it would hang on a network disk that does not respond.
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
        """Keep rights to everything in a folder except ``paths`` and everything below them.

        A rule for a folder covers everything below it. So folders in ``above`` get no rule of their own, but
        one rule for each of their entries.

        ``above``: all folders that contain one of the paths, at any depth.
        """
        with os.scandir(folder) as entries:
            for entry in entries:
                # Skip symbolic links, because the kernel applies the rules of a link's target.
                if entry.path in paths or entry.is_symlink():
                    continue
                if entry.path in above:
                    self.allow_beside(paths, above, rights, entry.path)
                else:
                    self.allow(entry.path, rights)

    def allow_connect(self, port: int) -> None:
        """Keep the right to connect to a TCP port on any host."""
        if self._tcp:
            _call(_ADD_RULE, self._descriptor, _NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)

    def restrict_self(self) -> None:
        """Restrict this process and all its children, for good.

        Without CAP_SYS_ADMIN, the kernel requires ``no_new_privs``, so this method sets it. As a result,
        setuid bits have no effect: a program such as ``sudo`` runs with the rights of the user who starts it.

        Raises LandlockUnavailableError if the kernel refuses. Also raises it if this process has other
        threads, because they would stay unrestricted.
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
        """Close the ruleset. Restricted processes stay restricted."""
        os.close(self._descriptor)


@contextmanager
def without(paths: Collection[str], but: Collection[str] = ()) -> Iterator[Ruleset]:
    """Yield a ruleset that denies opening these paths and everything below them.

    It also denies creating device files anywhere, because a new device file could stand for a denied device.
    Other files can be opened, created, moved and removed as before. There is one limitation: if a folder
    contains one of ``paths``, at any depth, then new entries directly in that folder cannot be opened.

    ``paths``: absolute paths without symbolic links.
    ``but``: files in ``paths`` or below them that can still be opened. Missing files are ignored.

    Raises LandlockUnavailableError if the kernel cannot create the ruleset.
    """
    above = set()
    for path in paths:
        while (parent := os.path.dirname(path)) != path:  # noqa: PTH120 - pathlib is slow
            above.add(path := parent)
    with closing(Ruleset(DEVICE | _MAKE_CHAR | _MAKE_BLOCK | _REFER)) as rules:
        with _explained():
            rules.allow_beside(frozenset(paths), above, DEVICE)
            for path in but:
                rules.allow(path, DEVICE)
            rules.allow("/", _REFER)
        yield rules


def confine(rights: Mapping[str, int], ports: Iterable[int] = ()) -> None:
    """Confine this process to the given files and TCP ports, for good.

    The process gives up all other files and all other use of TCP. It can no longer send signals to processes
    outside the restriction, or connect to their abstract Unix sockets. If the kernel's :func:`version` does
    not know a right, the process keeps that right. Without CAP_SYS_ADMIN, setuid bits no longer have an
    effect.

    ``rights``: :data:`LOOK`, :data:`READ`, :data:`CHANGE`, :data:`WRITE` or :data:`DEVICE` by path. The path
    of a folder stands for everything below it, including files that are created later. Symbolic links are
    followed once, now. Missing paths are ignored.
    ``ports``: TCP ports that the process may connect to, on any host.

    Raises LandlockUnavailableError if the kernel cannot restrict this process.
    """
    files = WRITE | _MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV
    with closing(Ruleset(files, tcp=_BIND_TCP | _CONNECT_TCP, scopes=_SCOPES)) as rules, _explained():
        for path, rights_to_path in rights.items():
            rules.allow(path, rights_to_path, flags=0)
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
    # Cached, because loading the library takes longer than a system call.
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *args: object) -> int:
    result: int = _library().syscall(number, *args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
