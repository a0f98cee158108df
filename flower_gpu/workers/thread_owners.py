"""Threads of this process that a fork would miss.

A fork has only the calling thread. If code in the fork hands work to a pool of threads, it waits forever,
because the pool is gone. Some libraries handle this. OpenBLAS ends its threads before a fork and starts new
threads afterwards. OpenMP's threads can be released (:func:`.threads.release_openmp_threads`). Forks of
processes with threads of OpenCV or pyarrow were seen to work. polars, a ``ThreadPoolExecutor`` and the writer
of TensorBoard do not handle it. So we need to know which library a thread belongs to.

Python knows its own threads. For a native thread, no interface names the library. By default, a thread has
the name of the program, and polars and pyarrow both have a thread called ``jemalloc_bg_thd``. But an idle
thread waits in a function of its library. The kernel shows the stack pointer of a waiting thread
(``/proc/self/task/*/syscall``), and the return addresses on the stack lie in the code of the library. This
distinguishes the threads of numpy, scipy, PyTorch, OpenCV, pyarrow and polars. A list of names does not, and
neither does the order in which threads were started.

The kernel does not show the stack pointer of a running thread. OpenBLAS's threads run only for a moment when
they start, so a short wait is enough. With ``OMP_WAIT_POLICY=active``, libgomp's threads look for work for
minutes, so they are released. A thread that still runs after that may hold any lock, such as OpenBLAS's, and
a fork would wait for this lock forever.

If the kernel does not show stacks (another system, a sandbox), native threads are assumed to survive a fork.
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

# Name prefixes of libraries whose threads may be missing in a fork. gRPC's threads belong to Flower.
_SURVIVE: Final = ("libgomp", "libiomp5", "libomp", "libscipy_openblas", "libopenblas", "libmkl_", "libblis")
_SURVIVE_TOO: Final = ("cv2.", "libopencv_", "libarrow.", "cygrpc.")
# Threads of every library wait in functions of these files, so the files do not identify a library.
_OF_ALL: Final = ("libc.", "libc-", "ld-", "libpthread", "libstdc++", "libm.", "[")
# Packages with Python threads that a worker does not need, because it calls no function of Flower, gRPC or
# this package that uses them. tqdm's monitor only redraws slow bars, and a fork starts a new monitor with its
# first bar.
_OF_PROGRAM: Final = ("flwr", "grpc", "flower_gpu", "tqdm")

_STACK_BYTES: Final = 8192  # the stack of a waiting thread needs a few hundred
_SETTLE_S: Final = 2.0  # time for threads that are about to wait or to end
_POLL_S: Final = 0.02


def native_ids() -> set[int]:
    """Return the ids of all threads of this process; empty if the system does not list them."""
    with suppress(OSError):
        return {int(path.name) for path in Path("/proc/self/task").iterdir()}
    return set()


def missed_in_fork(known: Collection[int] = ()) -> list[str]:
    """Return the names of Python threads that a fork would miss, and of libraries with such threads.

    ``known``: native ids of threads to ignore.
    """
    _let_closed_executors_end()
    python = {thread.native_id: thread for thread in threading.enumerate()}
    survivors = {threading.main_thread(), threading.current_thread()}
    python_threads = [
        f"thread {thread.name}"
        for number, thread in python.items()
        if not (number in known or thread in survivors or _package(thread) in _OF_PROGRAM)
    ]
    native = native_ids() - {*known} - python.keys() - {os.getpid()}
    return [*python_threads, *sorted(_harmful_files(native))]


def _let_closed_executors_end() -> None:
    """Wait for threads of executors that were shut down. They end as soon as they have no work.

    Flower fetches the parts of a message with an executor, and does not wait for its end. These threads look
    like threads of the app's executors, so waiting is the only way to distinguish them.
    """
    deadline = time.monotonic() + _SETTLE_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and _is_of_closed_executor(thread):
            thread.join(max(0.0, deadline - time.monotonic()))


def _is_of_closed_executor(thread: threading.Thread) -> bool:
    """Return True if the thread belongs to an executor that accepts no more work."""
    # The first argument of an executor's thread is a weak reference to the executor.
    reference = next(iter(getattr(thread, "_args", None) or ()), None)
    if _package(thread) != "concurrent" or not isinstance(reference, weakref.ref):
        return False
    executor = reference()
    return executor is None or bool(getattr(executor, "_shutdown", False))


def _package(thread: threading.Thread) -> str:
    """Return the top-level package of the code that a thread runs."""
    # A Timer has a function. Other subclasses have their own run().
    runs = getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread)
    return str(getattr(runs, "__module__", "")).partition(".")[0]


def _harmful_files(native: Collection[int]) -> set[str]:
    """Return the names of libraries in which native threads wait and which would not work in a fork."""
    # Return early without native threads, because reading the memory maps takes 4 ms with torch.
    if not native:
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
    """Return the innermost part of a thread's stack; None while the thread runs, empty if it is unknown."""
    try:
        with open(f"/proc/self/task/{number}/syscall") as file:
            fields = file.read().split()
        if fields[:1] == ["running"]:
            return None
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(int(fields[-2], 16))
            return memory.read(_STACK_BYTES)
    except (OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not show its stack
        return b""


class _Code:
    """The address ranges of this process that hold the code of libraries."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._parts: list[tuple[int, str]] = []  # end address, file name
        with suppress(OSError), open("/proc/self/maps") as maps:
            for line in maps:
                span, access, _, _, _, *path = line.split(maxsplit=5)
                if "x" in access and path:
                    begin, end = (int(address, 16) for address in span.split("-"))
                    self._begins.append(begin)
                    self._parts.append((end, path[0].strip().rpartition("/")[2]))

    def files(self, stack: bytes) -> Iterator[str]:
        """Yield the names of the files that the addresses on a stack point into, innermost first."""
        size = struct.calcsize("P")
        for (address,) in struct.iter_unpack("P", stack[: len(stack) // size * size]):
            place = bisect.bisect(self._begins, address) - 1
            if place >= 0 and address < self._parts[place][0]:
                yield self._parts[place][1]
