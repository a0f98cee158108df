"""The thread in which a process asks NVML: a driver that hangs then holds up nobody for ever.

It keeps NVML started while questions come often, and ends when they stop, or before a fork.
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

#: After so long without a question NVML is closed: it holds the GPUs' device files open.
IDLE_S = 5.0
_CLOSE_S = 5.0
_FORK_WAIT_S = 1.0  # for an answer that another thread waits for
_EXIT_S = 1.0  # from the last step of a thread to its end in the kernel
_EXIT_LOOK_S = 0.0005


class LateError(Exception):
    """There is no answer yet.

    ``waited_s``: how long ago the question was asked.
    """

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"no answer for {waited_s:.0f} s")
        self.waited_s = waited_s


class _Question(Generic[T]):
    def __init__(self, work: Callable[[], T], is_last: bool = False) -> None:
        self.is_last = is_last
        self.thread: threading.Thread
        self._work = work
        self._asked = time.monotonic()
        self._answer: T
        self._error: BaseException | None = None
        self._is_done = False
        self._done = threading.Lock()  # faster than an Event, and as much is not needed
        self._done.acquire()

    def work(self) -> None:
        self.thread = threading.current_thread()
        try:
            self._answer = self._work()
        except BaseException as error:
            self._error = error
        self._is_done = True
        self._done.release()

    def wait(self, timeout_s: float) -> None:
        """Wait until so long after the question was asked."""
        if self._is_done:  # whoever has waited before may have been interrupted with the lock
            return
        left_s = self._asked + timeout_s - time.monotonic()
        if not self._done.acquire(timeout=max(0.0, left_s)):
            raise LateError(time.monotonic() - self._asked)
        self._done.release()

    def answer(self, timeout_s: float) -> T:
        self.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return self._answer


class NVMLThread:
    """Asks one question after another, for the threads of one process.

    ``close``: gives NVML back.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        # Held by who asks, until there is an answer or no more time: questions are put in with it only. It
        # knows its owner, so a Ctrl-C between two lines does not keep it locked after a fork.
        self._lock = threading.RLock()
        self._questions: SimpleQueue[_Question[Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Question[Any] | None = None

    def ask(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run ``work``; return its result, or raise its exception.

        Raises LateError if there is no answer after ``timeout_s`` seconds; at once while an earlier question
        hangs.
        """
        began = time.monotonic()
        if not self._lock.acquire(timeout=timeout_s):
            raise LateError(time.monotonic() - began)
        try:
            return self._ask(work, timeout_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give NVML back and end the thread, unless it hangs.

        Afterwards the kernel no longer lists the thread, so Landlock can restrict the process.
        """
        with self._lock:
            self._end()

    def before_fork(self) -> None:
        """Give NVML back, and let nobody ask until the fork is made: the child could use neither."""
        # Without the lock, too: a thread that hangs must not keep others from forking.
        if self._lock.acquire(timeout=_FORK_WAIT_S):
            self._end()

    def after_fork_in_parent(self) -> None:
        """Let others ask again."""
        with suppress(RuntimeError):  # it is another thread's
            self._lock.release()

    def _ask(self, work: Callable[[], T], timeout_s: float) -> T:
        if self._last is not None:  # of somebody who had no more time, or was interrupted
            self._last.wait(timeout_s)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="flower-gpu-nvml", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: without one it works as well, mostly
                self._thread = None
                return work()
        return self._put(_Question(work)).answer(timeout_s)

    def _put(self, question: _Question[T]) -> _Question[T]:
        self._questions.put(question)
        self._last = question
        return question

    def _end(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._close()
            return
        with suppress(LateError):
            if self._last is not None:
                self._last.wait(_CLOSE_S)
            question = self._put(_Question(self._close, is_last=True))
            question.answer(_CLOSE_S)
            # Not self._thread: after a Ctrl-C, a thread may have answered that is no longer noted there.
            question.thread.join()
            _wait_for_exit(question.thread)

    def _run(self) -> None:
        idle_s: float | None = IDLE_S
        while True:
            try:
                question = self._questions.get(timeout=idle_s)
            except Empty:
                self._close()
                idle_s = None
                continue
            if question.is_last:  # here, where no Ctrl-C comes between: who asks next needs another thread
                self._thread = None
            question.work()
            if question.is_last:
                return
            del question  # with what was found: not kept until the next one
            idle_s = IDLE_S


def _wait_for_exit(thread: threading.Thread) -> None:
    """Wait until the kernel has removed a thread that has been joined.

    Before Python 3.13 ``join`` waits only for the interpreter's part of the thread. Of 3,000 joined threads,
    the kernel still listed every second one.
    """
    path = f"/proc/self/task/{thread.native_id}"
    deadline = time.monotonic() + _EXIT_S
    while os.path.exists(path) and time.monotonic() < deadline:  # noqa: PTH110 - a Path takes longer
        time.sleep(_EXIT_LOOK_S)
