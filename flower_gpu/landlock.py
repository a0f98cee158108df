"""Landlock: what a process gives up for good, with all that it starts. Root is not needed.

The rules are those of a process tree, and no program can take them back. The kernel's side is described in
landlock(7) and in its file Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
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
_IOCTL_DEV: Final = 1 << 15  # version 5, Linux 6.10
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
WRITE: Final = READ | _WRITE_FILE | _REMOVE | _MAKE | _REFER | _TRUNCATE
DEVICE: Final = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
_OF_A_FILE: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_SET_NO_NEW_PRIVS: Final = 38  # linux/prctl.h

#: The first version whose rules leave renames and links between folders alone, and its kernel.
LEAST_VERSION: Final = 2
_LEAST_KERNEL: Final = "5.19"


class UnavailableError(Exception):
    """The kernel lets this process give nothing up. The text says why, in words."""


def version() -> int:
    """Return the version of Landlock that the kernel has.

    Raises
    ------
    UnavailableError
        If it has none, or one with which programs would not find everything else as before.
    """
    try:
        found = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise UnavailableError("Landlock is not among the kernel's security modules (lsm=)") from None
        if error.errno == errno.EPERM:
            raise UnavailableError("the container forbids Landlock (seccomp)") from None
        raise UnavailableError(f"the kernel has no Landlock ({error.strerror})") from None
    except AttributeError:
        raise UnavailableError("there is no Landlock outside of Linux") from None
    if found < LEAST_VERSION:
        raise UnavailableError(
            f"with Landlock {found} programs could not move files between folders: that takes Linux "
            f"{_LEAST_KERNEL}"
        )
    return found


def give_up(paths: Collection[str], but: Collection[str] = ()) -> None:
    """Give up opening these files and all below them, and making device files anywhere.

    Other files are opened, made, moved and removed as before. So are new ones, but for those that come later
    into a folder that holds one of ``paths``, or into one above it: there is a rule for each file and folder
    beside them.

    Without the right to administer the system this sets ``no_new_privs``: programs with a setuid bit run as
    the user who starts them.

    Parameters
    ----------
    paths : collection of str
        Absolute, without symbolic links in them.
    but : collection of str
        Files among them that stay. Those that do not exist are left out.

    Raises
    ------
    UnavailableError
        If the kernel cannot do that.
    """
    has_ioctl = version() >= 5
    opening = _READ_FILE | _WRITE_FILE | (_IOCTL_DEV if has_ioctl else 0)
    handled = struct.pack("=Q", opening | _MAKE_CHAR | _MAKE_BLOCK | _REFER)
    try:
        rules = _call(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
        try:
            _allow_beside(rules, opening, "/", frozenset(paths))
            for path in but:
                _allow(rules, opening, path)
            _allow(rules, _REFER, "/")
            _restrict(rules)
        finally:
            os.close(rules)
    except OSError as error:
        raise UnavailableError(f"the kernel refuses Landlock's rules ({error.strerror})") from error


def confine(rights: Mapping[str, int], ports: Iterable[int] = ()) -> None:
    """Give up all files but these, TCP, and signals and abstract sockets of processes outside of this one.

    What the kernel's :func:`version` does not know stays as it is. Files are met by their names now: those
    that are made later in one of these folders can be opened, too. As in :func:`give_up`, an account without
    rights gives up programs with a setuid bit.

    Parameters
    ----------
    rights : mapping
        :data:`LOOK`, :data:`READ`, :data:`WRITE` or :data:`DEVICE` by the path of a file, or of a folder with
        all below it. Links are followed. Those that do not exist are left out.
    ports : iterable of int
        TCP ports to which it can connect, on any host.

    Raises
    ------
    UnavailableError
        If the kernel cannot do that.
    """
    found = version()
    files = WRITE | _MAKE_CHAR | _MAKE_BLOCK
    files |= _IOCTL_DEV if found >= 5 else 0
    if found < TRUNCATE_VERSION:
        files &= ~_TRUNCATE
    tcp = _BIND_TCP | _CONNECT_TCP if found >= TCP_VERSION else 0
    handled = struct.pack("=QQQ", files, tcp, _SCOPES if found >= SCOPES_VERSION else 0)
    try:
        rules = _call(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
        try:
            for path, wanted in rights.items():
                _allow(rules, wanted & files, path, follow=True)
            for port in ports if tcp else ():
                _call(_ADD_RULE, rules, _NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)
            _restrict(rules)
        finally:
            os.close(rules)
    except OSError as error:
        raise UnavailableError(f"the kernel refuses Landlock's rules ({error.strerror})") from error


def _allow_beside(rules: int, rights: int, folder: str, paths: frozenset[str]) -> None:
    """Allow all in a folder but these paths."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.path in paths or entry.is_symlink():  # what a link leads to has its own rule
                continue
            if any(path.startswith(f"{entry.path}/") for path in paths):
                _allow_beside(rules, rights, entry.path, paths)
            else:
                _allow(rules, rights, entry.path)


def _allow(rules: int, rights: int, path: str, *, follow: bool = False) -> None:
    # Gone meanwhile, or nobody's business here.
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        file = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        try:
            if not stat.S_ISDIR(os.fstat(file).st_mode):
                rights &= _OF_A_FILE
            _call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, file), 0)
        finally:
            os.close(file)


def _restrict(rules: int) -> None:
    try:
        _call(_RESTRICT_SELF, rules, 0)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT_SELF, rules, 0)


def _call(number: int, *args: object) -> int:
    found: int = ctypes.CDLL(None, use_errno=True).syscall(number, *args)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
