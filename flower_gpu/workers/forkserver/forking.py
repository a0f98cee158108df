"""The state of a process that forks workers: its settings, its connections, and its loop.

Two problems: forking a process with torch takes long, because the kernel copies an entry for each of 80,000
pages. And workers may leave processes behind. So the loop moves memory into huge pages when it is idle, and
ends the processes that finished workers have left.

The objects: :class:`Start` holds the settings of a server, :class:`Session` one connection to a caller.
:class:`Loop` waits for readable descriptors and exited children. :class:`Become` is how a fork leaves the
stack of its server.

Everything here runs in the only thread of the server. There is one race: a child may exit, and SIGCHLD
arrive, just before ``select`` blocks. So the signal writes to a pipe (``signal.set_wakeup_fd``), and
``select`` waits for that pipe as well.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import traceback
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flower_gpu.errors import FlowerGPUError, text_of
from flower_gpu.workers import worker as child
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.life import adopt_orphans, children, end_adopted, is_tracker

# Number of huge pages that a process collapses after each fork. A process with torch has about 160 in all.
# Collapsing one takes 5 ms, and saves 0.2 ms of CPU in each later fork. A federation of SuperNodes has
# perhaps twenty forks, so collapsing all of them at once would take more time than it saves.
_HUGE_PAGES = 2
_MADV_COLLAPSE = 25  # asm-generic/mman-common.h, Linux 6.1
_HUGE_PAGE = 1 << 21  # bytes, on x86-64 and usually on arm64
# Maximum size of an error text in bytes. A pipe accepts this much before anyone reads from it.
_MAX_TEXT = 4000

#: Message of a new server to the process that started it. Any other message is the text of an error.
READY = b"ready"


@dataclass(frozen=True)
class Start:
    """Settings of a fork server, chosen by the process that starts it."""

    name: str  # name of its socket
    idle_s: float  # seconds without users after which it ends
    without: list[str]  # top-level names of libraries that it must not import
    # The user's functions that it calls once, with their keyword arguments
    preload: list[Any] = field(default_factory=list)


class Become(BaseException):
    """Raised in a fork: unwind the stack of the parent, and then call ``work``.

    So the stack of a worker begins with its own work, even if its server is a fork of other servers. A deep
    stack costs tasks time: ``torch.manual_seed`` records the stack as long as CUDA has not started.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work


def become(work: Callable[[], object]) -> NoReturn:
    """Unwind the stack of the parent in a fork, and then call ``work``."""
    raise Become(work)


def describe(error: BaseException, *, is_of_user: bool = False) -> bytes:
    """Return the text of an error, encoded for the process that started the server.

    ``is_of_user``: whether the user's code may have raised it. The text then includes the traceback.
    """
    if isinstance(error, FlowerGPUError):
        return str(error).encode(errors="replace")[:_MAX_TEXT]
    text = text_of(error)
    if is_of_user:
        text += f"\n{''.join(traceback.format_exception(error)).rstrip()}"
    return text.encode(errors="replace")[:_MAX_TEXT]


@dataclass
class Session:
    """One connection of a caller.

    It serves calls, with one worker at a time, or keeps the server alive for a process that may make calls.
    """

    connection: socket.socket  # to the caller
    caller: int  # pid of the process at the other end
    is_proven: bool = False  # whether it has shown the proof of :mod:`flower_gpu.workers.forkserver.sockets`
    # Description of the call, from the "open" message. Empty before that message.
    record: dict[str, Any] = field(default_factory=dict)
    folder: int = -1  # descriptor of the caller's working directory, or -1
    pid: int = -1  # pid of the running worker, or -1
    label: str = ""  # name of the worker's call
    has_forked: bool = False  # whether a worker was forked for this connection
    settings_file: int = -1  # descriptor of the memory file with settings for workers only, or -1
    stays: bool = False  # whether it only keeps the server alive

    def close(self) -> None:
        """Close all descriptors."""
        self.connection.close()
        for descriptor in self.files() - {-1}:
            os.close(descriptor)
        self.folder = self.settings_file = -1

    def files(self) -> set[int]:
        """Return the descriptors other than the connection. -1 stands for a missing descriptor."""
        return {self.folder, self.settings_file}


class ChildWatch:
    """A selector that is also woken when children exit. The data of that key is ``on_child``."""

    def __init__(self, on_child: Callable[[], object]) -> None:
        self.selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self._wakeup, selectors.EVENT_READ, on_child)

    def clear(self) -> None:
        """Clear the wake-up. Call this before checking which children have exited."""
        with suppress(BlockingIOError):
            os.read(self._wakeup, 4096)

    def leave(self) -> None:
        """Restore the signal settings and close all descriptors. Called in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        os.close(self._wakeup)
        os.close(self._wakeup_end)


class Loop(ChildWatch):
    """The loop of a process that forks workers. It makes forks cheap, and ends the processes they leave."""

    def __init__(self, on_child: Callable[[], object]) -> None:
        self._small_pages: list[int] = []  # addresses of memory that could be in huge pages
        self.forks = 0  # number of forks for which no huge pages have been made yet
        self._helpers = children()  # processes that a library or a preload function has started
        adopt_orphans()
        super().__init__(on_child)

    def settle(self) -> None:
        """Make forks of this process cheap. Call this after all libraries are imported."""
        child.forget_exit_functions()
        self._small_pages = huge_page_regions()
        # Otherwise, the collector of a fork would touch every object, and so copy every page.
        gc.freeze()

    def wait(self, timeout_s: float | None) -> list[selectors.SelectorKey]:
        """Wait up to ``timeout_s`` seconds for readable descriptors, and return their keys.

        If nothing is readable after a fork, move some memory into huge pages and return an empty list. Huge
        pages halve the time of a fork. Only a few are made for each fork, because all of them would take 1.3
        s in a process with torch.
        """
        has_time = bool(self._small_pages and self.forks)
        ready = self.selector.select(0 if has_time else timeout_s)
        if has_time and not ready:
            self.forks -= 1
            for address in self._small_pages[-_HUGE_PAGES:]:
                collapse(address)
            del self._small_pages[-_HUGE_PAGES:]
        return [key for key, _ in ready]

    def end_left(self, workers: Set[int] = frozenset()) -> bool:
        """Kill processes that finished workers left in other sessions. Return True if there were any.

        The process groups of the living ``workers`` are spared, because their callers end them.
        """
        return end_adopted(self._helpers | workers, workers, is_spared=_is_spared)


def _is_spared(pid: int) -> bool:
    """Return True for another server, and for a resource tracker, which its worker's caller ends."""
    # A confined app could give its processes the name of a tracker, but they are in another session.
    return sockets.is_server(pid) or (os.getsid(pid) == os.getsid(0) and is_tracker(pid))


def huge_page_regions() -> list[int]:
    """Return the addresses of this process's memory that could be moved into huge pages."""
    regions: list[int] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _, _, _, *name = line.split(maxsplit=5)
            if access == "rw-p" and (not name or name[0].startswith("[heap]")):
                first, end = (int(address, 16) for address in span.split("-"))
                regions += range(-(-first // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE)
    return regions


def collapse(address: int) -> None:
    """Move the memory at an address of :func:`huge_page_regions` into a huge page, if the kernel can.

    This makes forks faster, because the kernel copies an entry for each page, and a process with torch has
    80,000 small pages. The content of the memory does not change. Needs Linux 6.1.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
