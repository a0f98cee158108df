"""How processes of a worker end: with their caller, after their call, or by the kernel.

A worker holds GPU memory, so no process of it may outlive its use. Each process may end at any time, even by
SIGKILL, and a killed process runs no cleanup code. So each case has another process, or the kernel, that
does the killing:

===========================================  ================================================================
event                                        who ends which processes
===========================================  ================================================================
The caller is gone, for any reason.          The kernel kills the worker's group: ``die_with_the_caller``.
The call is over or has timed out.           The caller kills the worker's group: ``end_group``.
The worker is gone, but it left processes    Their new parent kills them: the caller (``ending_left``) or
in sessions of their own.                    the fork server (``end_adopted``).
The worker is gone, but its resource         The tracker ends by itself. After 30 s the caller kills it:
tracker is not.                              ``end_later``.
A fork server ends while its successor       The kernel kills the successor: ``end_with_parent``.
still imports.
Main memory runs out.                        The kernel kills the worker before its caller:
                                             ``be_killed_first``.
===========================================  ================================================================

**Death of the caller.** Each worker has a life pipe. Only the caller holds the write end, and it never
writes. When the caller ends, the kernel closes that end, and Linux sends SIGKILL to the worker's process
group because of ``F_SETOWN`` and ``F_SETSIG`` on the read end. The worker runs no code for this, so it works
while C code holds the GIL. macOS has no ``F_SETSIG``, so a thread of the worker waits for the end of the pipe
there, and kills the group. If a fork of the caller inherited the write end, it would keep the workers of its
parent alive. So a fork handler closes the inherited write ends in the child (``_life_ends``).

**Process ids.** A pid is only safe to kill while it is reserved. The kernel reserves the pid of an exited
child until its parent reaps it. So :class:`OwnChild` looks for the exit with ``WNOWAIT``, the process group
is killed, and only then is the worker reaped.

**Races.** The caller may end before the signal is armed, so ``die_with_the_caller`` checks the pipe once
afterwards. ``end_with_parent`` checks its parent afterwards for the same reason. A leftover process may start
others while it is being killed, so ``ending_left`` repeats until it finds none, for at most 5 s.
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
_WORKER_OOM_SCORE = 500  # half of the maximum of 1000, see proc(5)
_ENDS = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
# Limit in seconds for ending leftover processes. They die at once, unless they keep starting other processes.
_END_OF_LEFT_S = 5.0
_PAUSE_S = 0.01

# Write ends of this process's life pipes. A fork that kept them open would keep the workers alive.
_life_ends: set[int] = set()


class OwnChild:
    """A worker that is a child of this process.

    ``reaped``: called after the worker is reaped, for an object that would otherwise wait for it as well.
    """

    #: Reason for an unknown exit code.
    why_unknown = "SIGCHLD is ignored here, or something else waits for all children"

    def __init__(self, pid: int, reaped: Callable[[], object] = lambda: None) -> None:
        self.pid = pid
        #: Peak memory in bytes, known once the worker is reaped; 0 if unknown.
        self.peak_bytes = 0
        self._reaped = reaped
        self._exited = False
        self._exitcode: int | None = None

    def has_exited(self) -> bool:
        """Return True if the worker has exited. Its pid stays reserved until it is reaped."""
        if self._exited:
            return True
        try:
            if hasattr(os, "waitid"):
                # WNOWAIT keeps the pid, and so the id of the group, reserved until the worker is reaped.
                status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                # Other codes mean that the process has only stopped, because it is traced.
                if status is not None and status.si_code in _ENDS:
                    self._exited = True
                    by_itself = status.si_code == os.CLD_EXITED
                    self._exitcode = status.si_status if by_itself else -status.si_status
            else:  # macOS before Python 3.13
                pid, wait_status = os.waitpid(self.pid, os.WNOHANG)
                if pid != 0:
                    self._exited = True
                    self._exitcode = os.waitstatus_to_exitcode(wait_status)
        except ChildProcessError:  # SIGCHLD is ignored here, or other code waits for all children
            self._exited = True
        return self._exited

    def reap(self, _: Sequence[str] = ()) -> int | None:
        """Reap the worker, which frees its pid, and return its exit status (``-n`` for signal ``n``).

        Returns None if the status is lost, because the program ignores SIGCHLD or waits for every child.
        """
        with suppress(ChildProcessError):
            self.peak_bytes = os.wait4(self.pid, 0)[2].ru_maxrss << 10
        with suppress(ChildProcessError):
            self._reaped()
        return self._exitcode


class StopOrder:
    """An order that makes all threads that watch workers end them.

    ``asks_where``: True if each worker must write the stacks of its threads first.
    """

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        self.asks_where = False
        self._is_given = False

    def give(self, *, asks_where: bool = False) -> None:
        """Give the order. Calling it again has no effect."""
        if not self._is_given:
            self._is_given = True
            self.asks_where = asks_where
            # This makes the read end readable in every thread that waits for it.
            os.close(self._write)

    def close(self) -> None:
        """Give the order, and close the descriptor. Call this when no thread waits for it."""
        self.give()
        with suppress(OSError):
            os.close(self.descriptor)


def life_pipe() -> tuple[int, int]:
    """Return a pipe (read end, write end). Forks of this process close the write end."""
    read, write = os.pipe()
    _life_ends.add(write)
    return read, write


def close_life_end(write: int) -> None:
    """Close the write end. The kernel then kills the rest of the worker's process group."""
    _life_ends.discard(write)
    os.close(write)


def _after_fork_in_child() -> None:
    for write in _life_ends:
        with suppress(OSError):
            os.close(write)
    _life_ends.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def die_with_the_caller(life: int) -> None:
    """Make the kernel kill this process group when the caller ends, even while the GIL is held."""
    if hasattr(fcntl, "F_SETSIG"):
        kill_group_at_end_of(life, os.getpgrp())
        poll = select.poll()
        poll.register(life, 0)  # POLLHUP is always reported
        if poll.poll(0):  # the caller ended before the signal was armed
            os.killpg(0, signal.SIGKILL)
        return

    def wait() -> None:  # macOS has no F_SETSIG
        os.read(life, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="flower-gpu-life", daemon=True).start()


def be_killed_first() -> None:
    """Make the kernel kill this worker before its caller if memory runs out.

    Then one call fails instead of the whole run. The kernel kills the largest process of the host, or of the
    full control group. The score makes a worker count as larger by half of the available memory.
    """
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):  # not Linux
        if int(path.read_text()) < _WORKER_OOM_SCORE:
            path.write_text(f"{_WORKER_OOM_SCORE}")


def end_with_parent(parent: int | None) -> None:
    """Make the kernel kill this process when its single-threaded parent ends; None switches that off."""
    number = 0 if parent is None else signal.SIGKILL
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)


class _SignalEvent(ctypes.Structure):
    """``struct sigevent``, with padding at its end for every system's variant."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 64),
    )


class _TimerSpan(ctypes.Structure):
    """``struct itimerspec``: the interval, then the time to the first signal, in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("again_s", "again_ns", "first_s", "first_ns"))


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Make the kernel kill this process if the block takes longer than ``seconds``.

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
    """Return the library with timers: the C library, or librt before glibc 2.34; None on other systems."""
    for name in (None, "librt.so.1") if sys.platform == "linux" else ():
        with suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "timer_create"):
                return library
    return None


def adopt_orphans(enable: bool = True) -> bool:
    """Become the new parent of every descendant that loses its parent, or undo that (``enable`` False).

    Returns False if the system lacks Linux's "child subreaper".
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enable), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def kill_group_at_end_of(read: int, group: int) -> None:
    """Make the kernel kill a process group when the other end of a pipe is closed. Linux only.

    The other end is open in one process only, so it closes when that process ends for any reason. No process
    has to run code for this, so a held GIL does not matter. The settings belong to the open file description,
    which children inherit.
    """
    fcntl.fcntl(read, fcntl.F_SETOWN, -group)
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)


def children() -> set[int]:
    """Return the pids of this process's children, including children that have ended but are not reaped."""
    pids: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                pids.update(map(int, file.read().split()))
    except FileNotFoundError:  # a kernel that does not list them
        return {pid for pid in _all_processes() if _state_parent_group(pid)[1] == os.getpid()}
    return pids


def is_running(pid: int) -> bool:
    """Return True if the process exists and has not ended. An unreaped process counts as ended."""
    return _state_parent_group(pid)[0] not in "ZX"


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _living_group(pid: int) -> int:
    state, _, group = _state_parent_group(pid)
    return -1 if state in "ZX" else group


def _state_parent_group(pid: int) -> tuple[str, int, int]:
    """Return state, parent and group of a process from proc(5)'s ``stat``; X, -1 and -1 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            state, parent, group, *_ = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", -1, -1
    return state, int(parent), int(group)


def end_adopted(
    kept: Collection[int], groups: Collection[int] = (), *, is_spared: Callable[[int], bool]
) -> bool:
    """Kill adopted children, which are processes of workers that have ended; return True if there were any.

    Call it again whenever a child has ended, because this process then adopts that child's children. This
    process and its living workers must have called :func:`adopt_orphans`. Then it adopts no process of a
    living worker.

    ``kept``: pids of children that are not adopted.
    ``groups``: process groups that are left alone, because another process ends them.
    """
    killed_any = False
    for pid in children().difference(kept):
        # An unreaped child keeps its pid, so the pid cannot belong to another process.
        with suppress(ProcessLookupError, ChildProcessError, PermissionError):
            if os.getpgid(pid) not in groups and not is_spared(pid):
                killed_any = True
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
    return killed_any


# Seconds that a tracker has to end by itself. On a busy host it has to wait for a core.
_TRACKER_S = 30.0
# The same, if no thread could be started and the caller itself has to wait.
_TRACKER_HERE_S = 0.5
# Part of the command line of Python's tracker, and of joblib's.
_TRACKER = b".resource_tracker import main"


def end_group(group: int) -> list[int]:
    """Kill a process group except its resource trackers, and return the trackers' pids. Linux only.

    Once all other processes of the worker are gone, Python's resource tracker unlinks the shared memory that
    the worker left, and ends.
    """
    members = [pid for pid in _all_processes() if _living_group(pid) == group]
    trackers = [pid for pid in members if is_tracker(pid)]
    if trackers:
        for pid in set(members).difference(trackers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:  # One call kills all members at once, so that none can start another process meanwhile.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    return trackers


def is_tracker(pid: int) -> bool:
    """Return True if a living process is a resource tracker, by its command line.

    The command line of a process in uninterruptible sleep is not read. That process may hold the lock of its
    memory map. A reader would then sleep until that process releases the lock. A tracker is not such a
    process, because it waits for a pipe.
    """
    if _state_parent_group(pid)[0] == "D":
        return False
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end_later(pids: Collection[int]) -> None:
    """Give the trackers of an ended worker 30 s to end by themselves, then kill them.

    A thread does the waiting, so this returns at once. If no thread can be started, it blocks for 0.5 s.
    """
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
    except RuntimeError:  # The thread limit is reached. Wait here for as long as most trackers need.
        end(_TRACKER_HERE_S)


@contextmanager
def ending_left(is_spared: Callable[[int], bool]) -> Iterator[None]:
    """Kill, after the block, all processes that a worker started in the block leaves behind. Linux only.

    This includes processes in sessions of their own. Within the block this process adopts them. The worker
    itself must have ended by the end of the block.
    """
    was_adopting = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was_adopting), 0, 0, 0)
    kept = children()
    adopt_orphans()
    try:
        yield
    finally:
        deadline = time.monotonic() + _END_OF_LEFT_S
        while end_adopted(kept, is_spared=is_spared) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if not was_adopting.value:
            adopt_orphans(False)


def explained(error: OSError) -> str:
    """Return the text of an error from starting a process, with the numbers if a limit was reached."""
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
    """Return the number of visible processes and threads of this account."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if path.stat().st_uid == os.getuid():
                count += sum(1 for _ in (path / "task").iterdir())
    return count
