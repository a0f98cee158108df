"""How workers die with their caller, how they end, and why none can be started.

===========================================  ================================================================
what has happened                            who ends what
===========================================  ================================================================
the caller is gone, whatever ended it        the kernel kills the worker's group: ``die_with_the_caller``
the call is over, or its time is             its caller ends the worker's group: ``end_group``
the worker is gone, not what it started      its parent ends what is in sessions of its own: the caller
in a session of its own                      (``ending_left``), or the fork server (``end_adopted``)
the worker is gone, its resource tracker     it ends itself; after 30 s the caller does: ``end_later``
is not
a fork server ends while its successor       the kernel kills the successor: ``end_with_parent``
still imports
===========================================  ================================================================
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flower_gpu import control_group
from flower_gpu.polling import readable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SIGEV_SIGNAL = 0  # asm-generic/siginfo.h
_WORKER_OOM_SCORE = 500  # of 1000, see proc(5)
_ENDS = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
_END_OF_LEFT_S = 5.0  # each is killed at once; one that starts others as fast as it can is not waited for
_PAUSE_S = 0.01

# Write ends of life pipes. A fork that kept one would keep other callers' workers alive.
_life_ends: set[int] = set()


class OwnChild:
    """A worker that this process started itself.

    ``reaped``: is called once its status was taken, for an object that would wait for it otherwise.
    """

    #: Why :meth:`reap` may not know how it ended.
    why_unknown = "SIGCHLD is ignored here, or something else waits for all children"

    def __init__(self, pid: int, reaped: Callable[[], object] = lambda: None) -> None:
        self.pid = pid
        #: The most memory that it had, once it is reaped; 0 where that is not known.
        self.peak_bytes = 0
        self._reaped = reaped
        self._exited = False
        self._exitcode: int | None = None

    def has_exited(self) -> bool:
        """Whether it is gone; its pid is still its own."""
        if self._exited:
            return True
        try:
            if hasattr(os, "waitid"):
                # WNOWAIT: its pid, and so its group's id, stays taken until it is reaped.
                found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None and found.si_code in _ENDS:  # else it has only stopped, to be traced
                    self._exited = True
                    by_itself = found.si_code == os.CLD_EXITED
                    self._exitcode = found.si_status if by_itself else -found.si_status
            else:  # macOS before Python 3.13
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid != 0:
                    self._exited = True
                    self._exitcode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # SIGCHLD is ignored here, or somebody else waits for all children
            self._exited = True
        return self._exited

    def reap(self, _: Sequence[str] = ()) -> int | None:
        """Give its pid back and return the exit status (``-n`` for signal ``n``).

        None where somebody else took the status: the program ignores SIGCHLD, or waits for every child.
        """
        with suppress(ChildProcessError):
            self.peak_bytes = os.wait4(self.pid, 0)[2].ru_maxrss << 10
        with suppress(ChildProcessError):
            self._reaped()
        return self._exitcode


class StopOrder:
    """Tells the threads that watch workers to end them.

    ``asks_where``: whether each worker is to say first where its threads are.
    """

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        self.asks_where = False
        self._is_given = False

    def give(self, *, asks_where: bool = False) -> None:
        """Give it; a second time changes nothing."""
        if not self._is_given:
            self._is_given = True
            self.asks_where = asks_where
            os.close(self._write)  # then the other end is readable, in every thread

    def close(self) -> None:
        """Give it, and let go of it, when nobody looks any more."""
        self.give()
        with suppress(OSError):
            os.close(self.descriptor)


def life_pipe() -> tuple[int, int]:
    """Return a pipe (read end, write end) whose write end stays in this very process."""
    read, write = os.pipe()
    _life_ends.add(write)
    return read, write


def close_life_end(write: int) -> None:
    """Close the write end: the kernel then kills the rest of the worker's process group."""
    _life_ends.discard(write)
    os.close(write)


def _after_fork_in_child() -> None:
    for write in _life_ends:
        with suppress(OSError):
            os.close(write)
    _life_ends.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def die_with_the_caller(life: int) -> None:
    """Have the kernel kill this process group when the caller is gone, even while the GIL is held."""
    if hasattr(fcntl, "F_SETSIG"):
        kill_group_at_end_of(life, os.getpgrp())
        poll = select.poll()
        poll.register(life, 0)  # POLLHUP is always reported
        if poll.poll(0):  # it went before the signal was armed
            os.killpg(0, signal.SIGKILL)
        return

    def wait() -> None:  # macOS has no F_SETSIG
        os.read(life, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="flower-gpu-life", daemon=True).start()


def be_killed_first() -> None:
    """Have the kernel end this worker before its caller where memory runs out: one call fails, and not a run.

    It takes the largest process of the host, or of the control group that is full. A worker counts as larger
    by half of what there is.
    """
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):  # another system
        if int(path.read_text()) < _WORKER_OOM_SCORE:
            path.write_text(f"{_WORKER_OOM_SCORE}")


def end_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its parent, a program of one thread, ends; None: no more."""
    number = 0 if parent is None else signal.SIGKILL
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before
        os._exit(1)


class _SignalEvent(ctypes.Structure):
    """``struct sigevent``, with more room at its end than any system needs."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 64),
    )


class _TimerSpan(ctypes.Structure):
    """``struct itimerspec``: interval, then time to the end, each in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("again_s", "again_ns", "first_s", "first_ns"))


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Have the kernel kill this process if the block takes longer.

    A POSIX timer that sends SIGKILL needs no thread and no GIL. It also ends a stopped process, which SIGALRM
    does not. On a system without such timers there is no limit.
    """
    timer, library = ctypes.c_void_p(), _timer_library()
    event = _SignalEvent(signal=signal.SIGKILL, notify=_SIGEV_SIGNAL)
    is_set = (
        library is not None
        and library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0
    )
    if is_set:
        span = _TimerSpan(first_s=int(seconds), first_ns=int(seconds % 1 * 1e9))
        library.timer_settime(timer, 0, ctypes.byref(span), None)
    try:
        yield
    finally:
        if is_set:
            library.timer_delete(timer)


def _timer_library() -> Any:
    """Return the library with timers: the C library, or librt with a glibc before 2.34; None elsewhere."""
    for name in (None, "librt.so.1") if sys.platform == "linux" else ():
        with suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "timer_create"):
                return library
    return None


def adopt_orphans(enable: bool = True) -> bool:
    """Become, or no longer be, the parent of each descendant whose own parent ends.

    Returns False where the system has no such thing (it is Linux's "child subreaper").
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enable), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def kill_group_at_end_of(read: int, group: int) -> None:
    """Have the kernel kill a process group when the other end of a pipe is closed. Linux only.

    That end is open in one process only, so it is closed when that process ends, whatever ended it. Nobody
    has to run any code for it, and a lock of the interpreter does not matter. The settings belong to the open
    file description, which children inherit.
    """
    fcntl.fcntl(read, fcntl.F_SETOWN, -group)
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)


def children() -> set[int]:
    """Return the pids of this process's children, also of those that have ended and are not reaped."""
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    except FileNotFoundError:  # a kernel that does not list them
        return {pid for pid in _all_processes() if _state_parent_group(pid)[1] == os.getpid()}
    return found


def is_running(pid: int) -> bool:
    """Tell whether there is such a process, and it has not ended: one that is not reaped yet has."""
    return _state_parent_group(pid)[0] not in "ZX"


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _living_group(pid: int) -> int:
    state, _, group = _state_parent_group(pid)
    return -1 if state in "ZX" else group


def _state_parent_group(pid: int) -> tuple[str, int, int]:
    """Return these fields of proc(5)'s ``stat``; dead, -1 and -1 where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            state, parent, group, *_ = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", -1, -1
    return state, int(parent), int(group)


def end_adopted(
    own: Collection[int], groups: Collection[int] = (), *, is_spared: Callable[[int], bool]
) -> bool:
    """End adopted children: processes of workers that have ended.

    To be called again when a child has ended: its own children are this process's then. Only for a process
    that has called :func:`adopt_orphans`, and whose living workers have, too: theirs do not come here.

    ``groups``: process groups whose members are left alone: somebody else ends them.
    """
    found = False
    for pid in children().difference(own):
        # A child that is not reaped keeps its pid, so this is no other process.
        with suppress(ProcessLookupError, ChildProcessError, PermissionError):
            if os.getpgid(pid) not in groups and not is_spared(pid):
                found = True
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
    return found


_TRACKER_S = 30.0  # on a busy host it waits for a core
_TRACKER_HERE_S = 0.5  # where there is no thread for that
_TRACKER = b".resource_tracker import main"  # Python's, and joblib's


def end_group(group: int) -> list[int]:
    """Kill a process group, but for the resource trackers in it; return these. Linux only.

    Python's resource tracker unlinks the shared memory that its worker has left, and ends, once all other
    processes of the worker are gone.
    """
    members = [pid for pid in _all_processes() if _living_group(pid) == group]
    trackers = [pid for pid in members if is_tracker(pid)]
    if trackers:
        for pid in set(members).difference(trackers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:  # all at once: none of them can start another one meanwhile
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    return trackers


def is_tracker(pid: int) -> bool:
    """Return True if a living process is a resource tracker, by its command line.

    The command line of a process in uninterruptible sleep is not read. That process may hold the lock of its
    memory map, and the reader would then sleep as long as it does. A tracker waits for a pipe.
    """
    if _state_parent_group(pid)[0] == "D":
        return False
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end_later(pids: Collection[int]) -> None:
    """Give trackers of a worker that is gone the time to end; then kill them. Returns at once, or soon."""
    descriptors = []
    for pid in pids:
        with suppress(OSError):
            descriptors.append(os.pidfd_open(pid))

    def end(patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for descriptor in descriptors:
            if not readable([descriptor], max(0, deadline - time.monotonic())):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)

    thread = threading.Thread(target=end, args=(_TRACKER_S,), name="flower-gpu-trackers", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: what most trackers need is waited for here
        end(_TRACKER_HERE_S)


@contextmanager
def ending_left(is_spared: Callable[[int], bool]) -> Iterator[None]:
    """End, after the block, what a worker that is started in it leaves in sessions of its own. Linux only.

    In the block this process is the parent of what is left; at its end the worker is gone.
    """
    was = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    own = children()
    adopt_orphans()
    try:
        yield
    finally:
        deadline = time.monotonic() + _END_OF_LEFT_S
        while end_adopted(own, is_spared=is_spared) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if not was.value:
            adopt_orphans(False)


def explained(error: OSError) -> str:
    """Return the text of an error of starting a process, with the numbers where a limit was reached."""
    if error.errno != errno.EAGAIN:
        return str(error)
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    figures = []
    if limit != resource.RLIM_INFINITY:
        figures.append(f"this account has {_count()} processes and threads and may have {limit} (ulimit -u)")
    if (of_group := control_group.process_count()) is not None:
        figures.append(f"the control group has {of_group[0]} and may have {of_group[1]} (pids.max)")
    reached = ", ".join(figures) or "the system has no more processes"
    return f"{error.strerror}; {reached}. Raise that limit, or let fewer workers run at a time"


def _count() -> int:
    """Count the processes and threads of this account that can be seen."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if path.stat().st_uid == os.getuid():
                count += sum(1 for _ in (path / "task").iterdir())
    return count
