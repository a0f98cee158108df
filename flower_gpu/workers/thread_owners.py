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

A thread that computes has no such stack. OpenBLAS's threads do so for a moment when they start. With
``OMP_WAIT_POLICY=active`` libgomp's threads look for work for minutes, so they are released. What computes
after that may hold any lock, such as OpenBLAS's, for which a fork would wait.

Where the kernel does not tell (another system, a sandbox), native threads are taken to survive.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from flower_gpu.workers import threads

# Beginnings of the names of files whose threads may be missing in a fork. gRPC's threads are Flower's.
_SURVIVE: Final = ("libgomp", "libiomp5", "libomp", "libscipy_openblas", "libopenblas", "libmkl_", "libblis")
_SURVIVE_TOO: Final = ("cv2.", "libopencv_", "libarrow.", "cygrpc.")
# Every thread waits in one of these, whatever library calls it.
_OF_ALL: Final = ("libc.", "libc-", "ld-", "libpthread", "libstdc++", "libm.", "[")
# Packages with Python threads that a worker does without. It calls nothing of Flower's, of gRPC's and ours.
# tqdm's monitor only redraws slow bars, and a fork starts a new one with its first bar.
_OF_PROGRAM: Final = ("flwr", "grpc", "flower_gpu", "tqdm")

_STACK_BYTES: Final = 8192  # a thread that waits needs some hundred
_SETTLE_S: Final = 2.0  # for threads that are about to wait or to end
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
    _let_closed_executors_end()
    python = {thread.native_id: thread for thread in threading.enumerate()}
    survivors = {threading.main_thread(), threading.current_thread()}
    found = [
        f"thread {thread.name}"
        for number, thread in python.items()
        if not (number in known or thread in survivors or _package(thread) in _OF_PROGRAM)
    ]
    native = native_ids() - {*known} - python.keys() - {os.getpid()}
    return [*found, *sorted(_harmful_files(native))]


def _let_closed_executors_end() -> None:
    """Wait for threads of executors that were shut down, which end as soon as they have nothing to do.

    Flower gets the parts of a message by an executor, which it does not wait for. Nothing else tells these
    threads from those of an executor of the app's.
    """
    deadline = time.monotonic() + _SETTLE_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and _is_of_closed_executor(thread):
            thread.join(max(0.0, deadline - time.monotonic()))


def _is_of_closed_executor(thread: threading.Thread) -> bool:
    """Return True if an executor that takes no more work has started a thread."""
    # A thread of an executor has a weak reference to it as its first argument.
    reference = next(iter(getattr(thread, "_args", None) or ()), None)
    if _package(thread) != "concurrent" or not isinstance(reference, weakref.ref):
        return False
    executor = reference()
    return executor is None or bool(getattr(executor, "_shutdown", False))


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
        if (stack := _stack(number)) is None:
            threads.release_openmp_threads()
        while stack is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            stack = _stack(number)
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
