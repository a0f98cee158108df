"""The caller's side: start a worker, watch it, take its result, make sure that nothing of it is left."""

from __future__ import annotations

import codecs
import json
import os
import pickle
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from flower_gpu.errors import (
    WorkerDiedError,
    WorkerTaskError,
    WorkerTimeoutError,
)
from flower_gpu.isolation import start, transport
from flower_gpu.isolation.call import Call, load_task
from flower_gpu.isolation.child import Descriptors, Outcome
from flower_gpu.isolation.events import Sink, sending_to

_TAIL_LINES = 30  # of a worker's output, kept for messages
_EXIT_GRACE_S = 10.0  # from the result to the exit: atexit functions, CUDA's own cleanup
_CHILDREN_GRACE_S = 0.2  # from a crash to the end of its group: resource trackers tidy up
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it
_POLL_S = 0.05  # only where the kernel has no pidfd
_CHUNK = 65536


class WorkerTraceback(Exception):  # noqa: N818 - a cause, never raised by itself
    """The traceback of an exception in a worker, as the cause of the same exception in the caller."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}\n"""'


def run(
    call: Call,
    start_method: str,
    timeout_s: float | None = None,
    on_event: Sink | None = None,
    on_start: Callable[[int], None] | None = None,
) -> Any:
    """Run ``call`` and return what its task returned, once the worker is gone.

    Parameters
    ----------
    call : Call
        The task and its arguments.
    start_method : str
        What :func:`flower_gpu.isolation.start.choose` returned.
    timeout_s : float, optional
        Seconds after which the worker and its children are ended. Not enforced for ``"inline"`` and
        ``"in-process"``, which have no process to end.
    on_event : callable, optional
        Receives the events the task sends.
    on_start : callable, optional
        Receives the pid of the worker.

    Raises
    ------
    WorkerStartError
        The worker could not be started.
    WorkerDiedError
        It ended without a result.
    WorkerTimeoutError
        It took longer than ``timeout_s``.
    Exception
        What the task raised, with the worker's traceback as its cause.
    """
    if start_method in ("inline", "in-process"):
        if on_start is not None:
            on_start(os.getpid())
        return _run_here(call, keep_env=start_method == "inline", on_event=on_event)
    began = time.monotonic()
    deadline = None if timeout_s is None else began + timeout_s
    with _started(call, start_method, on_event) as worker:
        if on_start is not None:
            on_start(worker.pid)
        finished = worker.watch_until(deadline)
        if not finished:
            worker.ask_where_it_is()
        exitcode = worker.end()
        outcome = worker.outcome()
    if outcome is not None:
        return _unwrap(call, outcome)
    if not finished:
        raise WorkerTimeoutError(
            f"{call.label}: no result within timeout_s={timeout_s:g}; the worker (pid {worker.pid}) and "
            f"its children were ended. Raise timeout_s if it was only slow.{_quoted(worker.tail)}"
        )
    raise WorkerDiedError(
        f"{call.label}: the worker (pid {worker.pid}) {_describe(exitcode)} after "
        f"{time.monotonic() - began:.1f} s, before it returned a result.{_quoted(worker.tail)}",
        exitcode=exitcode,
        tail="\n".join(worker.tail),
    )


class _Worker:
    """One started worker with the caller's ends of its lines."""

    def __init__(self, process: start.Process, life: int, reply: int) -> None:
        self.pid = process.pid
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = process
        self._life = life
        self._reply = reply
        self._has_result = False
        self._exitcode: int | None = None
        self._pidfd = _open_pidfd(process.pid)
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        if self._pidfd >= 0:
            self._selector.register(self._pidfd, selectors.EVENT_READ)

    def listen(self, stream: _Stream) -> None:
        """Read ``stream`` while waiting."""
        self._streams.append(stream)
        self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def on_result(self) -> None:
        self._has_result = True

    def watch_until(self, deadline: float | None) -> bool:
        """Wait for the worker's exit on its pipes, its process and the deadline together.

        Returns
        -------
        bool
            Whether it exited, or has delivered its result and only its exit takes too long.
        """
        exit_deadline: float | None = None
        while True:
            if self._has_result and exit_deadline is None:
                exit_deadline = deadline = time.monotonic() + _EXIT_GRACE_S
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return self._has_result
            if self._wait_once(remaining):
                return True

    def ask_where_it_is(self) -> None:
        """Have a hung worker write the stacks of its threads into its output."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)
        deadline = time.monotonic() + _STACK_DUMP_S
        while (remaining := deadline - time.monotonic()) > 0:
            if self._wait_once(remaining):
                return

    def end(self) -> int:
        """End the worker and its process group, however far it is; return its exit status."""
        if self._exitcode is None:
            if not self._has_exited():
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self._wait_for_exit()
            if not self._has_result:
                time.sleep(_CHILDREN_GRACE_S)
            with suppress(ProcessLookupError, PermissionError):  # the leader alone, a zombie (macOS)
                os.killpg(self.pid, signal.SIGKILL)  # before its pid is free for others
            for stream in self._streams:
                stream.drain()
            self._exitcode = self._process.wait()
        return self._exitcode

    def outcome(self) -> Outcome | None:
        """Read the result, or return None when the worker left none."""
        if not self._has_result:
            return None
        outcome: Outcome = transport.load(self._reply)
        return outcome

    def close(self) -> None:
        """Let go of every descriptor."""
        self._selector.close()
        for stream in self._streams:
            stream.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        os.close(self._reply)
        start.close_life_end(self._life)

    def _wait_once(self, timeout_s: float | None) -> bool:
        if self._pidfd < 0:
            timeout_s = _POLL_S if timeout_s is None else min(timeout_s, _POLL_S)
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None and not key.data.read():
                self._selector.unregister(key.fd)
        return self._has_exited()

    def _has_exited(self) -> bool:
        # WNOWAIT: its pid, and so its group's id, stays taken until everything is ended.
        if not hasattr(os, "waitid"):
            return False
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:  # somebody else in this program waits for all children
            return True

    def _wait_for_exit(self) -> None:
        while not self._wait_once(None):
            pass


class _Stream:
    """A pipe from the worker, read in whole chunks without blocking."""

    def __init__(self, descriptor: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._on_data = on_data

    def read(self) -> bool:
        """Take one chunk; return False at the end of the stream."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return True
        if data:
            self._on_data(data)
        return bool(data)

    def drain(self) -> None:
        """Take all that has been written so far."""
        with suppress(BlockingIOError):
            while data := os.read(self.descriptor, _CHUNK):
                self._on_data(data)
        self._on_data(b"")

    def close(self) -> None:
        os.close(self.descriptor)


class _Lines:
    """Cuts bytes into lines; an empty chunk flushes an unfinished one."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._on_line = on_line

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest], ""
        for line in lines:
            self._on_line(line)


@contextmanager
def _started(call: Call, start_method: str, on_event: Sink | None) -> Iterator[_Worker]:
    """Start a worker; whatever happens in the block, afterwards nothing of it is left."""
    child_ends: list[int] = []
    reply = transport.create("flower-gpu-reply")
    with start.start_lock:
        life_read, life_write = start.life_pipe()
        pipes = [os.pipe() for _ in range(3)]
        child_ends = [life_read, *(write for _, write in pipes)]
        events, stdout, stderr = pipes
        try:
            descriptors = Descriptors(life=life_read, events=events[1], reply=reply)
            process = start.STARTERS[start_method](call, descriptors, stdout[1], stderr[1])
        except BaseException:
            for read, _ in pipes:
                os.close(read)
            os.close(reply)
            start.close_life_end(life_write)
            raise
        finally:
            # Closed at once: with a copy here, the end of the worker's stream would never be seen.
            for descriptor in child_ends:
                os.close(descriptor)
    worker = _Worker(process, life_write, reply)
    try:
        worker.listen(_Stream(events[0], _Lines(_event_handler(worker, on_event))))
        worker.listen(_Stream(stdout[0], _echo(sys.stdout, worker.tail)))
        worker.listen(_Stream(stderr[0], _echo(sys.stderr, worker.tail)))
        yield worker
    finally:
        try:
            worker.end()
        finally:
            worker.close()


def _event_handler(worker: _Worker, on_event: Sink | None) -> Callable[[str], None]:
    def handle(line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:  # torn by a kill
            return
        if event.get("event") == "result":
            worker.on_result()
        elif on_event is not None:
            on_event(event)

    return handle


def _echo(target: TextIO | None, tail: deque[str]) -> Callable[[bytes], None]:
    """Pass a worker's output on to the caller's stream, and remember the last lines of it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    remember = _Lines(tail.append)

    def on_data(data: bytes) -> None:
        remember(data)
        text = decoder.decode(data)
        if target is not None and text:
            with suppress(OSError, ValueError):  # the caller's stream is closed
                target.write(text)
                target.flush()

    return on_data


def _run_here(call: Call, keep_env: bool, on_event: Sink | None) -> Any:
    before = {name: os.environ.get(name) for name in call.env}
    os.environ.update(call.env)
    try:
        with sending_to(on_event):
            if call.setup is not None:
                load_task(call.setup)()
            return load_task(call.task)(*call.args, **call.kwargs)
    finally:
        if not keep_env:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _unwrap(call: Call, outcome: Outcome) -> Any:
    if outcome.error_type is None:
        return outcome.value
    cause = WorkerTraceback(outcome.error_traceback)
    package = outcome.error_type.partition(".")[0]
    # An exception of a library that this process has not imported stays a name: a client that holds
    # only weights must not import torch for an error message.
    if outcome.error_pickle is not None and package in sys.modules:
        try:
            error = pickle.loads(outcome.error_pickle)
        except Exception:
            error = None
        if isinstance(error, Exception):
            raise error from cause
    name = outcome.error_type.removeprefix("builtins.")
    raise WorkerTaskError(f"{call.label} raised {name}: {outcome.error_text}") from cause


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
        return -1


def _describe(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "signal"
    text = f"was killed by {name} ({-exitcode})"
    if exitcode == -signal.SIGKILL:
        text += " (by somebody, or by the kernel for want of memory: see dmesg)"
    return text


def _quoted(tail: deque[str]) -> str:
    if not tail:
        return " It wrote nothing."
    return " The last lines it wrote:\n" + "\n".join(f"    {line}" for line in tail)
