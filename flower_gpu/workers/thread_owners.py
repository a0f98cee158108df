"""Threads of this process that a fork would miss.

A fork has the calling thread only. Code that hands work to a pool of threads waits there for ever, because
the pool is gone, unless its library notices. Some libraries do: OpenBLAS ends its threads before a fork and
starts new ones afterwards, OpenMP's threads can be released (:func:`.threads.release_openmp_threads`), and
forks of processes with threads of OpenCV or pyarrow were seen to work. polars, a ``ThreadPoolExecutor`` or
the writer of TensorBoard do not. So it matters whose a thread is.

Python knows its own threads. Nothing names the library of a native thread: by default it is called like the
program, and polars and pyarrow both call one of theirs ``jemalloc_bg_thd``. But an idle thread waits in a
function of its library. The kernel tells where the stack of a waiting thread is
(``/proc/self/task/*/syscall``), and the return addresses on it lie in the code of the library. This tells
apart the threads of numpy, scipy, PyTorch, OpenCV, pyarrow and polars; a list of names, or the order in
which threads were started, does not.

Where the kernel does not tell (another system, a sandbox), native threads are taken to survive.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

# Beginnings of the names of files whose threads may be missing in a fork. gRPC's threads are Flower's.
_SURVIVE: Final = ("libgomp", "libiomp5", "libomp", "libscipy_openblas", "libopenblas", "libmkl_", "libblis")
_SURVIVE_TOO: Final = ("cv2.", "libopencv_", "libarrow.", "cygrpc.")
# Every thread waits in one of these, whatever library calls it.
_OF_ALL: Final = ("libc.", "libc-", "ld-", "libpthread", "libstdc++", "libm.", "[")
# Packages with Python threads that a worker does without. It calls nothing of Flower's and ours. tqdm's
# monitor only redraws slow bars, and a fork starts a new one with its first bar.
_OF_PROGRAM: Final = ("flwr", "flower_gpu", "tqdm")

_STACK_BYTES: Final = 8192  # a thread that waits needs some hundred
_SETTLE_S: Final = 2.0  # for OpenBLAS's threads, which compute without work when they start
_POLL_S: Final = 0.02


def native_ids() -> set[int]:
    """Return the ids of all threads of this process; empty where the system does not tell."""
    with suppress(OSError):
        return {int(path.name) for path in Path("/proc/self/task").iterdir()}
    return set()


def missed_in_fork(known: Collection[int] = ()) -> list[str]:
    """Return the names of Python threads, and of files of libraries, whose threads a fork would miss.

    ``known``: native ids of threads that do not count.
    """
    python = {thread.native_id: thread for thread in threading.enumerate()}
    program = {id(thread) for thread in (*_of_program(), threading.main_thread(), threading.current_thread())}
    found = [
        f"thread {thread.name}"
        for number, thread in python.items()
        if number not in known and id(thread) not in program
    ]
    native = native_ids() - {*known} - python.keys() - {os.getpid()}
    return [*found, *sorted(_harmful_files(native))]


def _of_program() -> list[threading.Thread]:
    """Return the threads of Flower and of this package.

    Flower starts its threads before it imports an app. So the ones before the newest of them are Flower's as
    well, such as those of its executors, which do not tell who made them.
    """
    threads = [thread for thread in threading.enumerate() if thread.is_alive()]
    own = [_package(thread) for thread in threads]
    newest_of_flower = max((place for place, name in enumerate(own) if name == _OF_PROGRAM[0]), default=-1)
    return [
        thread
        for place, thread in enumerate(threads)
        if place <= newest_of_flower or own[place] in _OF_PROGRAM
    ]


def _package(thread: threading.Thread) -> str:
    """Return the top-level package of what a thread runs."""
    # A Timer has a function; another subclass has its own run().
    runs = getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread)
    return str(getattr(runs, "__module__", "")).partition(".")[0]


def _harmful_files(native: Collection[int]) -> set[str]:
    """Return the names of the files in which native threads wait and that have no use for a fork."""
    if not native:  # to read the maps takes 4 ms with torch
        return set()
    deadline, harmful = time.monotonic() + _SETTLE_S, set()
    code = _Code()
    for number in native:
        while (stack := _stack(number)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if stack is None:
            harmful.add("a thread that computes")
            continue
        files = [file for file in code.files(stack) if not file.startswith(_OF_ALL)]
        if files and not any(file.startswith(_SURVIVE + _SURVIVE_TOO) for file in files):
            harmful.add(files[0])
    return harmful


def _stack(number: int) -> bytes | None:
    """Return the innermost part of a thread's stack; None while it computes, empty where that is not told."""
    try:
        with open(f"/proc/self/task/{number}/syscall") as file:
            fields = file.read().split()
        if fields[:1] == ["running"]:
            return None
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(int(fields[-2], 16))
            return memory.read(_STACK_BYTES)
    except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not tell
        return b""


class _Code:
    """The memory of this process with the code of libraries."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._parts: list[tuple[int, str]] = []  # end, name of the file
        with suppress(OSError), open("/proc/self/maps") as maps:
            for line in maps:
                span, access, _, _, _, *path = line.split(maxsplit=5)
                if "x" in access and path:
                    begin, end = (int(address, 16) for address in span.split("-"))
                    self._begins.append(begin)
                    self._parts.append((end, path[0].strip().rpartition("/")[2]))

    def files(self, stack: bytes) -> Iterator[str]:
        """Yield the names of the files that addresses on a stack lie in, innermost first."""
        size = struct.calcsize("P")
        for (address,) in struct.iter_unpack("P", stack[: len(stack) // size * size]):
            place = bisect.bisect(self._begins, address) - 1
            if place >= 0 and address < self._parts[place][0]:
                yield self._parts[place][1]
