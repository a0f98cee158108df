"""The thread in which a process calls a driver's library, so that a hang blocks no caller for ever.

The problem: when a GPU is lost, a call of NVML may never return, and a thread in it cannot be interrupted. So
callers never call the library themselves. They put a query into the queue of one daemon thread and wait with
a limit. While a query hangs, all later ones fail at once.

The thread keeps the library started while queries come often, because starting it is slow. It shuts it down
after some seconds without a query, because the library has the GPUs' device files open. It also ends before a
fork: the child would inherit a started library, but not the thread.

The locks: ``_lock`` is held by the caller whose turn it is, from its question to its answer, so there is at
most one pending query. ``_Query._done`` is released by the thread when the answer is there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Seconds without a query after which the library is shut down.
IDLE_S = 5.0
_CLOSE_S = 5.0
# Longest wait before a fork for the query of another thread
_FORK_WAIT_S = 1.0
# Longest wait for the end of a thread in the kernel, after its last line of Python
_EXIT_S = 1.0
_EXIT_POLL_S = 0.0005


class LateError(Exception):
    """The library has not answered in time.

    ``waited_s``: seconds since the query was sent.
    """

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"no answer for {waited_s:.0f} s")
        self.waited_s = waited_s


class _Query(Generic[T]):
    """A call of the library, with its result. ``is_last`` ends the thread afterwards."""

    def __init__(self, work: Callable[[], T], is_last: bool = False) -> None:
        self.is_last = is_last
        self.thread: threading.Thread
        self._work = work
        self._sent_at = time.monotonic()
        self._result: T
        self._error: BaseException | None = None
        self._is_done = False
        self._done = threading.Lock()  # faster than an Event
        self._done.acquire()

    def run(self) -> None:
        """Do the work. Runs in the thread for queries."""
        self.thread = threading.current_thread()
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._is_done = True
        self._done.release()

    def wait(self, timeout_s: float) -> None:
        """Wait for the answer. Raises LateError ``timeout_s`` seconds after the query was sent."""
        if self._is_done:  # an earlier waiter may have been interrupted while it held the lock
            return
        remaining_s = self._sent_at + timeout_s - time.monotonic()
        if not self._done.acquire(timeout=max(0.0, remaining_s)):
            raise LateError(time.monotonic() - self._sent_at)
        self._done.release()

    def answer(self, timeout_s: float) -> T:
        """Wait for the answer and return it, or raise the error of the work."""
        self.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return self._result


class QueryThread:
    """Runs the queries of all threads of a process, one after the other.

    ``close``: shuts the library down.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        # Held by the caller with the pending query, until the answer or the end of its time. A reentrant lock
        # knows its owner, so a Ctrl-C between two lines does not leave it locked after a fork.
        self._lock = threading.RLock()
        self._queries: SimpleQueue[_Query[Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Query[Any] | None = None

    def ask(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run ``work`` in the thread. Return its result, or raise its exception.

        Raises LateError if there is no answer after ``timeout_s`` seconds, or at once if an earlier query
        hangs.
        """
        started_at = time.monotonic()
        if not self._lock.acquire(timeout=timeout_s):
            raise LateError(time.monotonic() - started_at)
        try:
            return self._ask(work, timeout_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Shut the library down and end the thread, unless it hangs.

        The kernel no longer lists the thread when this returns, so Landlock can restrict the process.
        """
        with self._lock:
            self._end()

    def before_fork(self) -> None:
        """Shut the library down, which the child could not use, and block callers until the fork is done."""
        # After the timeout the fork goes on without the lock: a hanging driver must not prevent forks.
        if self._lock.acquire(timeout=_FORK_WAIT_S):
            self._end()

    def after_fork_in_parent(self) -> None:
        """Unblock other callers."""
        # A RuntimeError means that before_fork did not get the lock.
        with suppress(RuntimeError):
            self._lock.release()

    def _ask(self, work: Callable[[], T], timeout_s: float) -> T:
        # The caller of the last query may have timed out or been interrupted.
        if self._last is not None:
            self._last.wait(timeout_s)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="flower-gpu-driver", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                # The limit of threads is reached. The library works in this thread too, unless the driver
                # hangs.
                self._thread = None
                return work()
        return self._put(_Query(work)).answer(timeout_s)

    def _put(self, query: _Query[T]) -> _Query[T]:
        self._queries.put(query)
        self._last = query
        return query

    def _end(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._close()
            return
        with suppress(LateError):
            if self._last is not None:
                self._last.wait(_CLOSE_S)
            query = self._put(_Query(self._close, is_last=True))
            query.answer(_CLOSE_S)
            # Not self._thread, because another thread may have answered after a Ctrl-C.
            query.thread.join()
            _wait_for_exit(query.thread)

    def _run(self) -> None:
        idle_s: float | None = IDLE_S
        while True:
            try:
                query = self._queries.get(timeout=idle_s)
            except Empty:
                self._close()
                idle_s = None
                continue
            if query.is_last:
                # The next query needs a new thread. Set here, because a Ctrl-C can interrupt the caller only.
                self._thread = None
            query.run()
            if query.is_last:
                return
            # Do not keep the result until the next query.
            del query
            idle_s = IDLE_S


def _wait_for_exit(thread: threading.Thread) -> None:
    """Wait until the kernel no longer lists a joined thread.

    Before Python 3.13, ``join`` waits only for the interpreter's part of the thread. In a test with 3,000
    joined threads, the kernel still listed every second one.
    """
    path = f"/proc/self/task/{thread.native_id}"
    deadline = time.monotonic() + _EXIT_S
    while os.path.exists(path) and time.monotonic() < deadline:  # noqa: PTH110 - a Path takes longer
        time.sleep(_EXIT_POLL_S)
