"""Become another program on a kernel that has no ``pidfd_open`` (Linux before 5.3): a seccomp filter."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_PIDFD_OPEN = 434  # on every architecture
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_UNSUPPORTED = 77


class _Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def main() -> None:
    """Install the filter and run the arguments."""
    steps = [
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 1, _PIDFD_OPEN),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    found = _Filter(len(steps), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(found), 0, 0
    ):
        sys.exit(_UNSUPPORTED)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
