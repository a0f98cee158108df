"""Landlock: what a process gives up for good, with all that it starts. Root is not needed.

The rules are those of a process tree, and no program can take them back. The kernel's side is described in
landlock(7) and in its file Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Collection
from contextlib import suppress
from typing import Final

# asm-generic/unistd.h: the same numbers on all architectures.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446

# linux/landlock.h
_VERSION: Final = 1  # flag of landlock_create_ruleset
_PATH_BENEATH: Final = 1  # type of a rule
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_MAKE_CHAR: Final = 1 << 6
_MAKE_BLOCK: Final = 1 << 11
_REFER: Final = 1 << 13  # version 2, Linux 5.19
_IOCTL_DEV: Final = 1 << 15  # version 5, Linux 6.10

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


def _allow(rules: int, rights: int, path: str) -> None:
    with suppress(FileNotFoundError, PermissionError):  # gone meanwhile, or nobody's business here
        file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
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
