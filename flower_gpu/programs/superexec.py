"""Our ``flower-superexec``: Flower's SuperExec, which is woken by its parent and so polls it seldom.

Flower starts a ``flower-superexec`` beside each SuperNode and beside a SuperLink. It polls its parent for
tasks, ten times a second at our interval, and starts a process for each task. With a hundred SuperNodes these
polls alone are more than two cores can answer.

This module also has the SuperLink of ``flower-gpu launch``, which wakes its SuperExec for each run.

Three threads or processes matter here. The main thread of the SuperExec runs Flower's loop, and waits in
:meth:`SuperExecTime.sleep`. Its parent wakes it over a socket (waits.py). A daemon thread waits for the end
of the parent, and then interrupts the main thread by SIGINT (:func:`end_with`).
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from flower_gpu import standard_streams
from flower_gpu.flower.private_names import LINK_STATES, SUPEREXEC, find
from flower_gpu.programs import objects, waits

#: Longest wait without a wake-up, because a wake-up may get lost.
LONGEST_S: Final = 60.0

_LOOK_S: Final = 0.2  # interval between checks of the parent if the kernel has no pidfds


# Methods of Flower's states that create a task.
_TASK_MAKERS: Final = ("create_run", "create_task")


def superlink() -> None:
    """Run Flower's SuperLink."""
    from flwr.superlink.cli import flower_superlink

    objects.answer_for_many(objects.SUPERLINK)
    waker = waits.Waker()
    if all(waits.call_after(state, maker, waker.wake) for state in LINK_STATES for maker in _TASK_MAKERS):
        waker.announce()  # otherwise it is another Flower, with a SuperExec that goes on polling
    sys.argv[0] = "flower-superlink"
    flower_superlink()


def main() -> None:
    """Run Flower's SuperExec."""
    standard_streams.open_missing()
    loop: Any = importlib.import_module(SUPEREXEC)
    from flwr.supercore.cli import flower_superexec

    # With --executor it was not started by its parent. Its tasks may have to wait for capacity.
    wake_ups = waits.of_environment()
    is_parents = not any(argument.startswith("--executor") for argument in sys.argv)
    if wake_ups is not None and is_parents and find(f"{SUPEREXEC}:time") is not None:
        loop.time = SuperExecTime(wake_ups)
        if find(f"{SUPEREXEC}:{_MONITOR}") is not None:
            setattr(loop, _MONITOR, end_with)
    sys.argv[0] = "flower-superexec"
    flower_superexec()


class SuperExecTime:
    """The module ``time`` for a SuperExec's loop."""

    def __init__(self, wake_ups: waits.WakeUps, longest_s: float = LONGEST_S) -> None:
        self._wake_ups = wake_ups
        self._longest_s = longest_s

    def sleep(self, seconds: float) -> None:
        """Wait for a wake-up. Without a wake-up, wait for at least the time that Flower requests."""
        self._wake_ups.wait(max(seconds, self._longest_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


_MONITOR: Final = "start_parent_process_monitor"  # as Flower calls it


def end_with(pid: int) -> None:
    """End this process by SIGINT when its parent ends, as Flower does.

    Flower's own monitor checks the parent five times a second, and its signal would not interrupt a wait.
    """
    main_thread = threading.main_thread().ident
    threading.Thread(target=_end_with, args=(pid, main_thread), daemon=True).start()


def _end_with(pid: int, main_thread: int) -> None:
    _wait_for_end_of(pid)
    signal.pthread_kill(main_thread, signal.SIGINT)


def _wait_for_end_of(pid: int) -> None:
    with suppress(OSError, AttributeError):  # no such process; not Linux, or an old kernel
        descriptor = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os.close(descriptor)
    with suppress(OSError):
        while True:
            os.kill(pid, 0)
            time.sleep(_LOOK_S)
