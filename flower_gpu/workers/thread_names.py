"""Names of threads: an unconfined process helps confined processes to set them in ``/proc``.

To name another of its threads, a program writes to the file ``/proc/self/task/<thread>/comm``. NVIDIA's
driver does so from version 570 on, and CUDA does not start if that fails. Landlock has no rule for "this file
of every future process". A rule covers one existing folder with everything below it, and the folder of a
process does not exist before the process.

So seccomp makes the kernel ask before a confined process opens an existing file for writing:

1. The process that makes the message's folder starts a thread and a socket in the folder (:func:`provided`).
2. Each confined worker sends the descriptor of its seccomp listener to that socket (:func:`ask`).
3. For each open call, the thread reads the path from the memory of the calling process. If the file names a
   thread of that process, the thread opens it and passes the descriptor on. All other calls continue, and
   Landlock decides.

A confined process gains nothing else by such requests, because the kernel lets the holder of such a file
name threads of its own process only.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from flower_gpu import seccomp
from flower_gpu.errors import ConfigError
from flower_gpu.workers import state_folder
from flower_gpu.workers.life import StopOrder

_SOCKET: Final = "names"  # in the folder of a message
_PATH: Final = re.compile(rb"/proc/(?:self|[0-9]+)/task/([0-9]+)/comm\0")
_MOST_OF_PATH: Final = 64
_MOST_LISTENERS: Final = 16  # each try of a call has one listener
_LISTENER: Final = "anon_inode:seccomp notify"
# Seconds to wait for the end of the thread. If it still reads then, it ends with its process.
_END_S: Final = 5.0

_SET_PTRACER: Final = 0x59616D61  # linux/prctl.h
_ANY: Final = ctypes.c_ulong(-1)


@contextmanager
def provided(folder: Path) -> Iterator[None]:
    """Let the confined workers of a folder and their child processes name their threads.

    Raises ConfigError if the socket or the thread cannot be made.
    """
    stop = StopOrder()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as requests:
            thread = threading.Thread(
                target=_serve, args=(requests, stop.descriptor), name="flower-gpu-names", daemon=True
            )
            try:
                with state_folder.short_name(folder) as place:
                    requests.bind(f"{place}/{_SOCKET}")
                thread.start()
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"--confine: no process can answer the worker of a message: {error}"
                ) from error
            try:
                yield
            finally:
                stop.give()
                thread.join(_END_S)
    finally:
        stop.close()


def ask(folder: str, listener: int) -> None:
    """Send the seccomp listener to the process that made the folder (:func:`provided`); may raise OSError."""
    be_readable()
    os.register_at_fork(after_in_child=be_readable)
    try:
        with (
            state_folder.short_name(Path(folder)) as place,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests,
        ):
            requests.connect(f"{place}/{_SOCKET}")
            socket.send_fds(requests, [b"\0"], [listener])
    finally:
        os.close(listener)


def be_readable() -> None:
    """Let other processes of this account read this process's memory, which Yama allows only to ancestors.

    The helper has to read the path of an open call there. Landlock still denies it to confined processes.
    """
    ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def can_be_given() -> bool:
    """Return True if this process can name its threads."""
    with suppress(OSError):
        os.close(os.open(f"/proc/self/task/{threading.get_native_id()}/comm", os.O_RDWR))
        return True
    return False


def _serve(requests: socket.socket, end: int) -> None:
    """Answer the open calls of confined processes until ``end`` becomes readable."""
    listeners: set[int] = set()
    poll = select.poll()
    for descriptor in (requests.fileno(), end):
        poll.register(descriptor, select.POLLIN)
    try:
        while True:
            for descriptor, events in poll.poll():
                if descriptor == end:
                    return
                if descriptor == requests.fileno():
                    for new in _sent(requests, _MOST_LISTENERS - len(listeners)):
                        listeners.add(new)
                        poll.register(new, select.POLLIN)
                elif events & select.POLLIN:
                    _reply(descriptor)
                else:  # all processes of this listener have ended
                    poll.unregister(descriptor)
                    listeners.remove(descriptor)
                    os.close(descriptor)
    finally:
        for descriptor in listeners:
            os.close(descriptor)


def _sent(requests: socket.socket, max_count: int) -> Iterator[int]:
    """Yield up to ``max_count`` seccomp listeners from a request, and close all other descriptors of it."""
    descriptors: list[int] = []
    with suppress(OSError):
        descriptors = socket.recv_fds(requests, 1, _MOST_LISTENERS)[1]
    for descriptor in descriptors:
        # Check the kind of file, because an app can send any descriptor.
        if max_count > 0 and str(Path(f"/proc/self/fd/{descriptor}").readlink()) == _LISTENER:
            max_count -= 1
            yield descriptor
        else:
            os.close(descriptor)


def _reply(listener: int) -> None:
    with suppress(OSError):  # the process has ended meanwhile
        opening = seccomp.asked(listener)
        try:
            file = _opened(opening)
            try:
                seccomp.answer(listener, opening, file)
            finally:
                os.close(file)
        except (OSError, OverflowError):
            seccomp.answer(listener, opening, None)


def _opened(opening: seccomp.Opening) -> int:
    """Return a descriptor of the file that names a thread of the calling process; OSError for other paths."""
    memory = os.open(f"/proc/{opening.thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        path = os.pread(memory, _MOST_OF_PATH, opening.path_at)
    finally:
        os.close(memory)
    match = _PATH.match(path)
    if match is None:
        raise FileNotFoundError
    # The folder of a thread lists only threads of the same process.
    file = f"/proc/{opening.thread}/task/{match[1].decode()}/comm"
    return os.open(file, opening.flags & os.O_ACCMODE | os.O_CLOEXEC)
