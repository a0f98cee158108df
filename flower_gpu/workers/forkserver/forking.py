"""The state of a process that forks workers."""

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

# How many pieces of memory a process puts into huge pages after a fork, with torch about 160 in all. One
# takes 5 ms; each saves 0.2 ms of CPU in all later forks. A federation of SuperNodes has perhaps twenty: all
# of it at once would take more than it saves.
_HUGE_PAGES = 2
_MADV_COLLAPSE = 25  # asm-generic/mman-common.h, Linux 6.1
_HUGE_PAGE = 1 << 21  # bytes, on x86-64 and usually on arm64
_MAX_TEXT = 4000  # of an error, in bytes: a pipe takes it without a reader

#: What a server that can be connected to writes to the process that started it; anything else is an error.
READY = b"ready"


@dataclass(frozen=True)
class Start:
    """How a fork server was asked for."""

    name: str  # its socket's name
    idle_s: float  # seconds after which it ends when nobody uses it
    without: list[str]  # libraries that it must not have
    # Functions of the user's to call once, with their keyword arguments
    preload: list[Any] = field(default_factory=list)


class Become(BaseException):
    """Raised in a fork: let it leave all that its parent was in the middle of, and do ``work``.

    So the stack of a worker begins with its own work, however many servers have come before its own. Tasks
    feel that: ``torch.manual_seed`` writes down the stack while CUDA has not started.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work


def become(work: Callable[[], object]) -> NoReturn:
    """Raise it."""
    raise Become(work)


def describe(error: BaseException, *, is_of_user: bool = False) -> bytes:
    """Return the text of an error for the process that wanted the server.

    ``is_of_user``: whether code of the user's may have raised it; then its traceback is told as well.
    """
    if isinstance(error, FlowerGPUError):
        return str(error).encode(errors="replace")[:_MAX_TEXT]
    text = text_of(error)
    if is_of_user:
        text += f"\n{''.join(traceback.format_exception(error)).rstrip()}"
    return text.encode(errors="replace")[:_MAX_TEXT]


@dataclass
class Session:
    """One connection: of calls that have one worker at a time, or a process that says it may have calls."""

    connection: socket.socket  # to the caller
    caller: int  # the process at its other end
    is_proven: bool = False  # whether that may be a caller; see :mod:`flower_gpu.workers.forkserver.sockets`
    # What the caller wants; empty before it has said so
    record: dict[str, Any] = field(default_factory=dict)
    folder: int = -1  # descriptor of the caller's working directory, or -1
    pid: int = -1  # the worker, or -1
    label: str = ""  # what it does
    has_forked: bool = False  # whether there was one
    own: int = -1  # memory file with what only workers are to know
    stays: bool = False  # whether this is no call, but a process that may have some

    def close(self) -> None:
        """Let go of all descriptors."""
        self.connection.close()
        for descriptor in self.files() - {-1}:
            os.close(descriptor)
        self.folder = self.own = -1

    def files(self) -> set[int]:
        """Return its descriptors without the connection; -1 for missing ones."""
        return {self.folder, self.own}


class ChildWatch:
    """A selector that also tells when children have ended: it then calls ``on_child``."""

    def __init__(self, on_child: Callable[[], object]) -> None:
        self.selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self._wakeup, selectors.EVENT_READ, on_child)

    def clear(self) -> None:
        """Take note that children have ended, before they are looked at."""
        with suppress(BlockingIOError):
            os.read(self._wakeup, 4096)

    def leave(self) -> None:
        """Let go of all this, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        os.close(self._wakeup)
        os.close(self._wakeup_end)


class Loop(ChildWatch):
    """That of a process that forks workers: it makes forks cheap, and ends the processes that they leave."""

    def __init__(self, on_child: Callable[[], object]) -> None:
        self._small_pages: list[int] = []  # which could be in huge pages
        self.forks = 0  # that were not followed by some of that
        self._own = children()  # processes that a library or the user's data have started here
        adopt_orphans()
        super().__init__(on_child)

    def settle(self) -> None:
        """Make forks of this process cheap; all libraries are there by now."""
        child.forget_exit_functions()
        self._small_pages = huge_page_regions()
        gc.freeze()  # the collector of a fork would touch, and so copy, every object

    def wait(self, timeout_s: float | None) -> list[selectors.SelectorKey]:
        """Wait for something to read; after forks meanwhile use huge pages, which halves the time of a fork.

        For each of them only some: a process with torch has 1.3 s to do.
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
        """End processes that finished workers put into sessions of their own; tell whether there were any.

        The groups of the living ``workers`` are left alone: their callers end them.
        """
        return end_adopted(self._own | workers, workers, is_spared=_is_spared)


def _is_spared(pid: int) -> bool:
    """Tell whether this is another server, or a resource tracker, which its worker's caller ends."""
    # A confined app's processes, which may call themselves as they like, are in another session.
    return sockets.is_server(pid) or (os.getsid(pid) == os.getsid(0) and is_tracker(pid))


def huge_page_regions() -> list[int]:
    """Return the addresses of this process's memory that could be in huge pages."""
    regions: list[int] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _, _, _, *name = line.split(maxsplit=5)
            if access == "rw-p" and (not name or name[0].startswith("[heap]")):
                first, end = (int(address, 16) for address in span.split("-"))
                regions += range(-(-first // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE)
    return regions


def collapse(address: int) -> None:
    """Put the memory from an address of :func:`huge_page_regions` on into a huge page, if the kernel can.

    A fork has to write down each page, in both processes: with torch imported these are 80,000 small ones.
    Does nothing that a program could see. Needs Linux 6.1.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
