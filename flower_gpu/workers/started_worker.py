"""One worker on its caller's side, from its start to its end, and the facts about its call.

A caller must notice several things at once: output, reports and the exit of the worker, a time limit, and
an order to stop. Whatever happens first, the worker and its process group must be gone before the worker's
process id can be reused.

:class:`StartedWorker` owns one worker process. It holds the caller's ends of the worker's descriptors:

- ``_line``: the socket that carries calls to the worker and reports back.
- ``_stdout`` and ``_stderr``: pipes with the worker's output, which is echoed and kept for error texts.
- ``_pidfd``: becomes readable when the worker exits. Without pidfds the caller polls every ``_POLL_S``.

:class:`.CallWatch` holds the facts about one call, so a worker that does several calls gets several of these.

The thread that runs the call does all the waiting:

1. :meth:`StartedWorker.watch` waits for the result, the exit, the time limit or a stop order. When the result
   is there, the limit becomes the time that the worker has for its exit functions (``CallWatch.exit_s``).
2. After a timeout, :meth:`StartedWorker.ask_where_it_is` sends SIGQUIT, and the worker writes the stacks
   of its threads. The caller reads them for ``_STACK_DUMP_S``.
3. :meth:`StartedWorker.end` sends SIGKILL, waits for the exit, and gives child processes
   ``_CHILDREN_GRACE_S`` to tidy up. Then it kills the process group and reaps the worker. The order matters,
   because the kernel keeps the worker's pid, and so the id of its group, until the worker is reaped.

Other threads may call :meth:`StartedWorker.kill` only. It records the time, so ``watch`` waits at most
``KILLED_S`` longer. SIGKILL does not end a process that waits in the kernel for a GPU or disk that does not
answer. Then ``end`` returns False, and :mod:`flower_gpu.workers.caller` has a background thread try again.

The exit can be seen before the last report is read. So ``_wait_once`` reads up to ``_MAX_LATE_MESSAGES``
reports of an exited worker. The number is limited because a child of the worker may go on to write.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from flower_gpu.unkillable import KILLED_S, sleeping_in
from flower_gpu.workers import confined_replies, messages, state_folder
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.call_watch import FIRST_LOOKS_S, CallWatch
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.forkserver.client import ServerPlace
from flower_gpu.workers.life import StopOrder, end_group, end_later, ending_left
from flower_gpu.workers.output import Stream, all_lines, echo

# Seconds from the exit to the end of the process group, in which resource trackers tidy up.
_CHILDREN_GRACE_S = 0.5
# Seconds from the request for a stack dump to the kill of a hung worker.
_STACK_DUMP_S = 0.5
# Interval between checks for the exit if the kernel has no pidfds.
_POLL_S = 0.05
# Longest wait in the main thread, because a signal that another thread receives does not wake it.
_SIGNAL_S = 0.5
# Seconds between looks at the worker's memory after the first _FIRST_S seconds.
_LATER_LOOKS_S, _FIRST_S = 0.25, 1.0
# Longest wait in other threads, because :meth:`StartedWorker.kill` does not wake them.
_LOOK_S = 2.0
# Messages read from an exited worker. The number is limited because a child of it may go on to write.
_MAX_LATE_MESSAGES = 1000


class StartedWorker:
    """One worker process, with the caller's ends of its descriptors."""

    def __init__(
        self,
        call: Call,
        method: start.StartMethod,
        place: ServerPlace | None,
        files: Mapping[str, int],
        *,
        stays: bool,
    ) -> None:
        self._is_confined = call.confinement is not None
        limit = confined_replies.MOST_EVENT_BYTES if self._is_confined else messages.MOST_FILE_BYTES
        self._most_event_bytes = limit
        with ExitStack() as lines:
            # A fork server ends leftover processes of its own workers.
            if self._is_confined and not method.from_server:
                lines.enter_context(ending_left(sockets.is_server))
            self._process, self._line, *streams = start.launch(call, method, place, files, lines, stays=stays)
            self._lines = lines.pop_all()
        self._seen: CallWatch | None = None
        self._imported: list[str] = []  # modules that the worker reported as imported
        self._streams: dict[int, Stream] = {}
        self._calls = self._line.fileno()
        self._stdout, self._stderr = streams
        self._pidfd = _open_pidfd(self.pid)
        self._killed_at: float | None = None
        #: Descriptor of the ticket of the current call's lease, -1 if the call has no lease.
        self.lease_descriptor = call.lease_descriptor
        #: Kernel function that the worker sleeps in if SIGKILL has not ended it in time; otherwise empty.
        self.stuck_in = ""
        #: Descriptors whose other end is still open.
        self._open = {self._calls, *streams}
        self._poll = select.poll()
        for descriptor in self._open | {self._pidfd} - {-1}:
            self._poll.register(descriptor, select.POLLIN)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def descriptor(self) -> int:
        """Return a descriptor that becomes readable when the worker exits."""
        return self._pidfd if self._pidfd >= 0 else self._calls

    def has_exited(self) -> bool:
        """Return True if the worker has exited. Its pid stays reserved until it is reaped."""
        return self._process.has_exited()

    def take(self, call: Call, files: Mapping[str, int], *, stays: bool) -> None:
        """Send the worker another call; raise Gone if it has exited."""
        self.lease_descriptor = call.lease_descriptor
        start.send_call(call, self._line, files, stays=stays)

    def kill(self) -> None:
        """Kill the worker. May be called from any thread; :meth:`watch` then returns within KILLED_S."""
        self._killed_at = self._killed_at or time.monotonic()
        with suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def watch(self, seen: CallWatch, deadline: float | None, stopped_by: StopOrder | None = None) -> None:
        """Wait until the worker exits, or until the result if it stays for another call.

        Returns early at ``deadline`` or after a stop order. Output is echoed and reports are handled
        meanwhile.
        """
        self._seen = seen
        admit_lines = seen.call.admit_lines
        name = None if admit_lines is None else seen.call.log_prefix
        for descriptor, target in ((self._stdout, sys.stdout), (self._stderr, sys.stderr)):
            on_data = echo(target, seen.tail, name, admit_lines or all_lines)
            self._streams[descriptor] = Stream(descriptor, on_data)
        order = -1 if stopped_by is None else stopped_by.descriptor
        if order >= 0:
            self._poll.register(order, select.POLLIN)
        began = time.monotonic()
        try:
            is_leaving = False
            while not seen.stays and not seen.is_stopped:
                if seen.has_result and not is_leaving:
                    is_leaving, deadline = True, time.monotonic() + seen.exit_s
                if self._killed_at is not None:
                    deadline = min(deadline or math.inf, self._killed_at + KILLED_S)
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    seen.is_cancelled = self._killed_at is not None
                    return
                next_look_s = self._look(seen, time.monotonic() - began)
                if self._wait_once(next_look_s if left_s is None else min(left_s, next_look_s), order):
                    seen.has_ended = True
                    return
        finally:
            with suppress(KeyError, ValueError):  # already unregistered, or there was no order
                self._poll.unregister(order)
        for stream in self._streams.values():
            stream.drain()

    def leave(self, deadline: float) -> None:
        """Tell the worker that there are no more calls, and wait for its exit until ``deadline``."""
        with suppress(OSError):  # the worker has exited
            self._line.shutdown(socket.SHUT_WR)
        self._wait(deadline)

    def ask_where_it_is(self) -> None:
        """Have a hung worker write the stacks of its threads into its output."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)
        self._wait(time.monotonic() + _STACK_DUMP_S)

    def end(self, patience_s: float | None = None) -> bool:
        """Kill the worker and its process group in any state, and return True once they are gone.

        ``patience_s``: seconds to wait after SIGKILL; None: no limit.
        Returns False if the worker has not exited by then. In this case, call the method again later.
        """
        if not self._process.has_exited():
            self.kill()
            if not self._wait_for_exit(patience_s):
                self.stuck_in = sleeping_in(self.pid)
                if self._seen is not None:
                    self._seen.stuck_in = self.stuck_in
                return False
        try:
            self._let_its_children_tidy_up()
        finally:
            # Do this before reap(), because afterwards the pid may belong to another process.
            self._end_group()
            state_folder.remove_socket_folder(self.pid)
            exitcode = self._process.reap(self._imported)
        if self._seen is not None:
            self._seen.exitcode, self._seen.why_unknown = exitcode, self._process.why_unknown
            self._seen.peak_bytes = max(self._seen.peak_bytes, self._process.peak_bytes)
        for stream in self._streams.values():
            stream.drain()
        return True

    def close(self) -> None:
        """Close every descriptor, and kill processes that the worker left in sessions of their own."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._lines.close()

    def _end_group(self) -> None:
        # A confined app could name any of its processes like a resource tracker, so none is spared.
        if self._open and not self._is_confined and sys.platform == "linux":
            if trackers := end_group(self.pid):
                end_later(trackers)
            return
        with suppress(ProcessLookupError, PermissionError):  # the leader alone, a zombie (macOS)
            os.killpg(self.pid, signal.SIGKILL)

    def _look(self, seen: CallWatch, since_s: float) -> float:
        """Call ``on_look`` if a look is due, and return the seconds until the next look.

        Looks are frequent at first, because a call takes most of its memory early.
        """
        if seen.on_look is None:
            return math.inf
        if since_s >= seen.look_at_s:
            seen.on_look(self.pid)
            seen.look_at_s = since_s + (FIRST_LOOKS_S if since_s < _FIRST_S else _LATER_LOOKS_S)
        return seen.look_at_s - since_s

    def _wait(self, deadline: float) -> None:
        while (left_s := deadline - time.monotonic()) > 0 and not self._wait_once(left_s):
            pass

    def _wait_once(self, timeout_s: float | None, order: int = -1) -> bool:
        """Wait for output and read it once; return True if the worker has exited and all reports are read."""
        max_wait_s = _POLL_S
        if self._pidfd >= 0:
            max_wait_s = _LOOK_S if threading.current_thread() is not threading.main_thread() else _SIGNAL_S
        self._read_once(max_wait_s if timeout_s is None else min(timeout_s, max_wait_s), order)
        if not self._process.has_exited():
            return False
        for _ in range(_MAX_LATE_MESSAGES):
            if self._calls not in self._open or not messages.can_be_read(self._calls, 0):
                break
            self._receive()
        return True

    def _read_once(self, timeout_s: float, order: int = -1) -> None:
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            if descriptor == self._calls:
                self._receive()
            elif descriptor in self._streams:
                if not self._streams[descriptor].read():
                    self._forget(descriptor)
            elif descriptor == order and self._seen is not None:
                self._poll.unregister(order)
                self._seen.is_stopped = not self._seen.has_result

    def _receive(self) -> None:
        try:
            report, files = messages.receive(self._line, self._most_event_bytes)
        except messages.NotAMessage:
            return
        except messages.Gone:
            self._forget(self._calls)
            return
        for descriptor in files:
            os.close(descriptor)
        event = confined_replies.checked_event(report) if self._is_confined else report
        if self._seen is not None and event is not None:
            self._seen.take(event)
            self._imported = self._seen.imported or self._imported

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._open.discard(descriptor)

    def _wait_for_exit(self, patience_s: float | None) -> bool:
        # Output is not read here: reading may raise, and a worker that is being killed waits for no reader.
        poll = select.poll()
        pause_s = _POLL_S
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
            pause_s = KILLED_S
        deadline = math.inf if patience_s is None else time.monotonic() + patience_s
        while not self._process.has_exited():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poll.poll(min(pause_s, left_s) * 1000)
        return True

    def _let_its_children_tidy_up(self) -> None:
        """Wait briefly for child processes that still have the exited worker's output open."""
        # The pidfd is readable by now, so it would end every wait at once.
        if self._pidfd >= 0:
            self._poll.unregister(self._pidfd)
        deadline = time.monotonic() + _CHILDREN_GRACE_S
        while self._open and (left_s := deadline - time.monotonic()) > 0:
            self._read_once(left_s)


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
        return -1
