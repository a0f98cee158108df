"""A file system that accepts requests but does not answer them, so a process that uses it stays in state D.

It is a FUSE file system, served by this process. Once the server has read a request, the kernel makes the
requesting process wait for the answer, whatever signal arrives. Run as a program, this module starts another
program that can use such a disk, in its own mount namespace::

    python hung_disk.py FOLDER PROGRAM ARGUMENT...

After a line on its standard input, it answers all requests with an error. It exits with the program's status.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

_INIT = 26  # FUSE_INIT of linux/fuse.h
_NO_ANSWER = {2, 36, 42}  # FORGET, INTERRUPT, BATCH_FORGET
_HEADER = struct.Struct("IIQ")  # length, operation, number of the request
_ANSWER = struct.Struct("IiQ")  # length, error, number of the request
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_PRIVATE_REC = (1 << 18) | (1 << 14)


class HungDisk:
    """The server of a file system that hangs, mounted at ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._answers = False
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0"
        _call("mount", b"hung", os.fsencode(folder), b"fuse", 0, options.encode())
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            data = os.read(self._device, 1 << 20)
            _, operation, number = _HEADER.unpack_from(data)
            if operation == _INIT:
                _, _, read_ahead, _ = struct.unpack_from("IIII", data, 40)
                body = struct.pack("IIIIHHIIHHI", 7, 31, read_ahead, 0, 16, 12, 4096, 1, 0, 0, 0) + bytes(24)
                os.write(self._device, _ANSWER.pack(_ANSWER.size + len(body), 0, number) + body)
            elif operation not in _NO_ANSWER:
                with self._lock:
                    self._waiting.append(number)
                    if self._answers:
                        self._fail_all()

    def answer(self) -> None:
        """Answer all pending and future requests with an error."""
        with self._lock:
            self._answers = True
            self._fail_all()

    def _fail_all(self) -> None:
        while self._waiting:
            os.write(self._device, _ANSWER.pack(_ANSWER.size, -errno.EIO, self._waiting.pop()))


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[function](*arguments):
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def _own_mounts() -> None:
    """Enter a new mount namespace and, unless this process is root, a new user namespace."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, _MS_PRIVATE_REC, None)


def main(folder: str, *program: str) -> int:
    """Run a program with a disk that hangs until a line can be read from standard input."""
    _own_mounts()
    disk = HungDisk(Path(folder))

    def answer_on_request() -> None:
        sys.stdin.readline()
        disk.answer()

    threading.Thread(target=answer_on_request, daemon=True).start()
    return subprocess.run([sys.executable, *program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
