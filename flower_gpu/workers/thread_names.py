"""Names of threads: a confined process sets them in ``/proc`` with the help of one that is not confined.

A program names another one of its threads by a file, ``/proc/self/task/<thread>/comm``. NVIDIA's driver does
so from version 570 on, and CUDA does not start where it cannot. No rule of Landlock says "this file of each
process to come": a rule is about one folder with all below it, and the folder of a process is not there
before the process.

So the kernel asks, by seccomp, before it opens any existing file for writing for a confined process
(:func:`ask`). The process that has made the message's folder answers, in a thread (:func:`given`): a process
gets the file for the name of a thread of its own. All other calls go on, and Landlock decides. What is told
here by a confined process gives it nothing else: who holds such a file open can name threads of its own
process only, says the kernel.
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
_MOST_LISTENERS: Final = 16  # one for each try of a call
_LISTENER: Final = "anon_inode:seccomp notify"
_END_S: Final = 5.0  # a thread that still reads then ends with its process

_SET_PTRACER: Final = 0x59616D61  # linux/prctl.h
_ANY: Final = ctypes.c_ulong(-1)


@contextmanager
def given(folder: Path) -> Iterator[None]:
    """Let the confined workers of a folder, and all that they start, name their threads; else ConfigError."""
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
                raise ConfigError(f"--confine: nobody can answer the worker of a message: {error}") from error
            try:
                yield
            finally:
                stop.give()
                thread.join(_END_S)
    finally:
        stop.close()


def ask(folder: str, listener: int) -> None:
    """Have the maker of a folder answer the kernel's questions (:func:`given`); else OSError."""
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
    """Let other processes of this account read this one's memory, where Yama lets only its ancestors.

    A path is there that the kernel asks about. Processes that are confined stay kept from it, by Landlock.
    """
    ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def can_be_given() -> bool:
    """Tell whether this process can name its threads."""
    with suppress(OSError):
        os.close(os.open(f"/proc/self/task/{threading.get_native_id()}/comm", os.O_RDWR))
        return True
    return False


def _serve(requests: socket.socket, end: int) -> None:
    listeners: set[int] = set()
    poll = select.poll()
    for descriptor in (requests.fileno(), end):
        poll.register(descriptor, select.POLLIN)
    try:
        while True:
            for descriptor, found in poll.poll():
                if descriptor == end:
                    return
                if descriptor == requests.fileno():
                    for new in _sent(requests, _MOST_LISTENERS - len(listeners)):
                        listeners.add(new)
                        poll.register(new, select.POLLIN)
                elif found & select.POLLIN:
                    _answer(descriptor)
                else:  # no process is left that it is about
                    poll.unregister(descriptor)
                    listeners.remove(descriptor)
                    os.close(descriptor)
    finally:
        for descriptor in listeners:
            os.close(descriptor)


def _sent(requests: socket.socket, most: int) -> Iterator[int]:
    descriptors: list[int] = []
    with suppress(OSError):
        descriptors = socket.recv_fds(requests, 1, _MOST_LISTENERS)[1]
    for descriptor in descriptors:
        # An app can send what it likes.
        if most > 0 and str(Path(f"/proc/self/fd/{descriptor}").readlink()) == _LISTENER:
            most -= 1
            yield descriptor
        else:
            os.close(descriptor)


def _answer(listener: int) -> None:
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
    """Open the file that names a thread, for the process of that thread. Raises OSError for other paths."""
    memory = os.open(f"/proc/{opening.thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        path = os.pread(memory, _MOST_OF_PATH, opening.path_at)
    finally:
        os.close(memory)
    found = _PATH.match(path)
    if found is None:
        raise FileNotFoundError
    # The folder of one thread has those of its process, and no other's.
    file = f"/proc/{opening.thread}/task/{found[1].decode()}/comm"
    return os.open(file, opening.flags & os.O_ACCMODE | os.O_CLOEXEC)
