"""One worker on its caller's side, from its start to its end, and the facts about its call."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.unkillable import KILLED_S, sleeping_in
from flower_gpu.workers import confined_replies, messages, state_folder
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.events import Sink, note_imported
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.forkserver.client import ServerPlace
from flower_gpu.workers.life import StopOrder, end_group, end_later, ending_left
from flower_gpu.workers.output import Stream, Tail, all_lines, echo

EXIT_GRACE_S = 10.0  # from the result to the exit: atexit functions, CUDA's own cleanup
WAIT_FOR_EXIT_S = 1.0  # of that, before the next call may begin; all of it for a worker with a lease
_CHILDREN_GRACE_S = 0.5  # from its exit to the end of its group: resource trackers tidy up
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it
_POLL_S = 0.05  # only where the kernel has no pidfd
_SIGNAL_S = 0.5  # in the main thread, which a signal that another thread raises does not wake
# Between two looks at its memory, in the first second and later.
_FIRST_LOOKS_S, _LATER_LOOKS_S, _FIRST_S = 0.05, 0.25, 1.0
_LOOK_S = 2.0  # in other threads, which nothing wakes when :meth:`StartedWorker.kill` was called
_MOST_LATE = 1000  # messages of a worker that is gone: a child of it may go on to write


@dataclass
class CallWatch:
    """What is known of one call that a worker does."""

    call: Call
    pid: int
    on_event: Sink | None
    #: Whether the worker has read it; of a new one that need not be told.
    is_begun: bool
    tail: Tail = field(default_factory=Tail)
    has_result: bool = False
    #: Whether the worker waits for another call.
    stays: bool = False
    #: Whether it is gone, and how it ended as far as that is known (``-n``: by signal ``n``).
    has_ended: bool = False
    exitcode: int | None = None
    #: The reason for no exit code.
    why_unknown: str = ""
    #: Whether it was to be ended because its caller was told to.
    is_stopped: bool = False
    #: Whether another thread has killed it, and it was still there after KILLED_S.
    is_cancelled: bool = False
    #: What it does in the kernel, if SIGKILL has not ended it within KILLED_S; else empty.
    stuck_in: str = ""
    #: Variables that the task's module set after the fork server's libraries had read them.
    set_too_late: dict[str, str | None] | None = None
    #: Whether the kernel killed it because main memory ran out, as far as that is certain.
    is_out_of_memory: bool = False
    #: Is called now and then with the process id, to look at the worker's memory.
    on_look: Callable[[int], None] | None = None
    look_at_s: float = _FIRST_LOOKS_S  # since the begin of the watch
    #: Where its task has called sys.exit.
    sys_exit: str = ""
    #: Seconds that it has been importing, at least.
    import_s: float = 0.0
    #: The modules that its worker had to import by now, if it told more of them during the call.
    imported: list[str] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def hangs(self) -> bool:
        """Whether the worker has to be ended while it does the call."""
        return not self.has_ended and not self.has_result

    @property
    def exit_s(self) -> float:
        """How long to wait for the worker's exit after the result."""
        may_be_late = self.call.held < 0 and self.call.confinement is None
        return min(EXIT_GRACE_S, WAIT_FOR_EXIT_S) if may_be_late else EXIT_GRACE_S

    @property
    def is_late_to_exit(self) -> bool:
        """Whether the result is there, and the worker has not exited within ``exit_s``."""
        return self.has_result and not self.has_ended and self.exit_s < EXIT_GRACE_S

    def take(self, told: dict[str, Any]) -> None:
        """Take a report of the worker."""
        event = told if self.call.confinement is None else confined_replies.checked_event(told)
        if event is None:
            return
        kind = event.get("event")
        if kind == "result":
            self.has_result, self.stays = True, bool(event.get("stays"))
            self.peak_bytes = event.get("peak_bytes") or 0
            if self.on_event is not None:
                self.on_event({**event, "event": "worker_result"})
        elif kind == "begun":
            self.is_begun = True
        elif kind == "importing":
            self.import_s = float(event["seconds"])
        elif kind == "sys_exit":
            self.sys_exit = str(event["where"])
        elif kind == "imported":
            self.imported = event["names"]
            note_imported(self.imported)
        elif kind == "set_too_late":
            self.set_too_late = event["variables"]
        elif self.on_event is not None:
            self.on_event(event)


class StartedWorker:
    """One worker with the caller's ends of its lines: started, watched through its calls, ended."""

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
            if self._is_confined and not method.from_server:  # a fork server does that itself
                lines.enter_context(ending_left(sockets.is_server))
            self._process, self._line, *streams = start.launch(call, method, place, files, lines, stays=stays)
            self._lines = lines.pop_all()
        self._seen: CallWatch | None = None
        self._imported: list[str] = []  # modules that it had to import, by its reports
        self._streams: dict[int, Stream] = {}
        self._calls = self._line.fileno()
        self._stdout, self._stderr = streams
        self._pidfd = _open_pidfd(self.pid)
        self._killed_at: float | None = None
        #: The ticket of its present call's lease, as of the call.
        self.held = call.held
        #: What it does in the kernel, if SIGKILL has not ended it in time; else empty.
        self.stuck_in = ""
        #: What is still open at the other end.
        self._open = {self._calls, *streams}
        self._poll = select.poll()
        for descriptor in self._open | {self._pidfd} - {-1}:
            self._poll.register(descriptor, select.POLLIN)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def descriptor(self) -> int:
        """What can be read once it is gone."""
        return self._pidfd if self._pidfd >= 0 else self._calls

    def has_exited(self) -> bool:
        """Whether it is gone; its pid is still its own."""
        return self._process.has_exited()

    def take(self, call: Call, files: Mapping[str, int], *, stays: bool) -> None:
        """Send it another call; Gone if that is too late."""
        self.held = call.held
        start.send_call(call, self._line, files, stays=stays)

    def kill(self) -> None:
        """Kill it, also from another thread; then :meth:`watch` waits no longer than KILLED_S."""
        self._killed_at = self._killed_at or time.monotonic()
        with suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def watch(self, seen: CallWatch, deadline: float | None, stopped_by: StopOrder | None = None) -> None:
        """Wait for the end of the worker, or for the result where it stays; or for a limit or an order."""
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
            with suppress(KeyError, ValueError):  # it was given, or there is none
                self._poll.unregister(order)
        for stream in self._streams.values():
            stream.drain()

    def leave(self, deadline: float) -> None:
        """Let it end, as there are no more calls; wait for that."""
        with suppress(OSError):  # it has ended
            self._line.shutdown(socket.SHUT_WR)
        self._wait(deadline)

    def ask_where_it_is(self) -> None:
        """Have a hung worker write the stacks of its threads into its output."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)
        self._wait(time.monotonic() + _STACK_DUMP_S)

    def end(self, patience_s: float | None = None) -> bool:
        """End it and its process group, however far it is.

        ``patience_s``: how long to wait after SIGKILL; None: as long as it takes.
        Returns False if it is still there then. It has to be ended once more.
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
            self._end_group()  # before its pid is free for others
            state_folder.remove_socket_folder(self.pid)
            exitcode = self._process.reap(self._imported)
        if self._seen is not None:
            self._seen.exitcode, self._seen.why_unknown = exitcode, self._process.why_unknown
            self._seen.peak_bytes = max(self._seen.peak_bytes, self._process.peak_bytes)
        for stream in self._streams.values():
            stream.drain()
        return True

    def close(self) -> None:
        """Close every descriptor, and end its processes in sessions of their own."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._lines.close()

    def _end_group(self) -> None:
        # A confined app's processes may call themselves as they like.
        if self._open and not self._is_confined and sys.platform == "linux":
            if trackers := end_group(self.pid):
                end_later(trackers)
            return
        with suppress(ProcessLookupError, PermissionError):  # the leader alone, a zombie (macOS)
            os.killpg(self.pid, signal.SIGKILL)

    def _look(self, seen: CallWatch, since_s: float) -> float:
        """Have somebody look at the worker's memory if it is time; return the seconds until the next look.

        Looks are frequent at first: a call takes most of its memory soon.
        """
        if seen.on_look is None:
            return math.inf
        if since_s >= seen.look_at_s:
            seen.on_look(self.pid)
            seen.look_at_s = since_s + (_FIRST_LOOKS_S if since_s < _FIRST_S else _LATER_LOOKS_S)
        return seen.look_at_s - since_s

    def _wait(self, deadline: float) -> None:
        while (left_s := deadline - time.monotonic()) > 0 and not self._wait_once(left_s):
            pass

    def _wait_once(self, timeout_s: float | None, order: int = -1) -> bool:
        """Read the available output, or wait for it; tell whether the worker is gone and all is read."""
        longest = _POLL_S
        if self._pidfd >= 0:
            longest = _LOOK_S if threading.current_thread() is not threading.main_thread() else _SIGNAL_S
        self._read_once(longest if timeout_s is None else min(timeout_s, longest), order)
        if not self._process.has_exited():
            return False
        for _ in range(_MOST_LATE):
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
            told, files = messages.receive(self._line, self._most_event_bytes)
        except messages.NotAMessage:
            return
        except messages.Gone:
            self._forget(self._calls)
            return
        for descriptor in files:
            os.close(descriptor)
        if self._seen is not None:
            self._seen.take(told)
            self._imported = self._seen.imported or self._imported

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._open.discard(descriptor)

    def _wait_for_exit(self, patience_s: float | None) -> bool:
        # Without reading: that may raise, and a worker that is being killed waits for no reader.
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
        """Wait a moment for processes that still have the output of the worker, which is gone."""
        if self._pidfd >= 0:  # it would end every wait at once
            self._poll.unregister(self._pidfd)
        deadline = time.monotonic() + _CHILDREN_GRACE_S
        while self._open and (left_s := deadline - time.monotonic()) > 0:
            self._read_once(left_s)


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
        return -1
