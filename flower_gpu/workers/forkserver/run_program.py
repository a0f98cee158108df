"""A run's own fork server: a process that forks a worker when one of its caller's lines has a call.

The worker does the calls of that line, as many as its caller wants.
"""

from __future__ import annotations

import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from flower_gpu.errors import ConfigError
from flower_gpu.frameworks import cuda_answers
from flower_gpu.gpu import guard_rules
from flower_gpu.workers import call, events, socket_folder, threads, transport
from flower_gpu.workers import worker as child
from flower_gpu.workers.forkserver import identity, libraries, sockets
from flower_gpu.workers.forkserver.forking import MANY_FORKS, Loop
from flower_gpu.workers.life import (
    adopt_orphans,
    be_killed_first,
    die_with_the_caller,
    end_group,
    explained,
)
from flower_gpu.workers.native import release_openmp_threads

_CHILDREN_GRACE_S = 0.5  # from a worker's exit to the end of its group: resource trackers tidy up
_HANDLED = (signal.SIGCHLD,)  # here; a worker of the fork server, which this process is, has no others
_KILLED_GRACE_S = 2.0  # from its SIGKILL
_TICK_S = 0.02  # while such a group is waited for
_IDLE_S = 0.2  # without a call: the next one comes with the next round, or never


# Set by a task that leaves this process in a state that other tasks do not expect.
_has_to_leave = False
# Whether another call may follow the one that runs.
_may_stay = False


def serve(
    name: str,
    *,
    modules: Sequence[str] = (),
    meanwhile: Sequence[str] = (),
) -> None:
    """Fork workers for a caller, until it closes the connection.

    ``name``: what the calls are of; for the fork server, which remembers what it needs.
    ``modules``: libraries to import first, as far as there are any of these names. Forks have the same random
    numbers: tasks seed themselves.
    ``meanwhile``: environment variables that were set until now only, and are none of the workers'.
    """
    connection = _connected()
    if libraries.cuda_is_touched():  # by what a spawned server preloads: forks of it are of no use
        raise ConfigError(libraries.cuda_message(call.started_cuda or "what is preloaded"))
    cuda_answers.ask_nvml()
    for variable in meanwhile:
        os.environ.pop(variable, None)
    for module in modules:
        try:
            libraries.import_all([module])
        except libraries.UnfitLibraryError as error:
            if error.is_cuda:
                print(
                    f"flower-gpu: {error}. Each worker imports it for itself, which is slower: choose the "
                    "device in a function instead",
                    file=sys.stderr,
                )
            sockets.send(connection, {"unfit": error.libraries})
            return
        except (Exception, SystemExit):  # the worker that imports it will tell
            continue
    _RunServer(connection).run()


def _connected() -> socket.socket:
    """Connect to the caller, over what it has left with this worker."""
    # That itself is open in the caller, too, and maybe in forks of it: nobody would see it close.
    connection, callers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with callers, socket.socket(fileno=child.held()) as left:
        sockets.send(left, {"connection": True}, [callers.fileno()])
    child.keep_for_caller(-1)
    return connection


@dataclass
class _Line:
    """One of the caller's lines: a worker at a time reads calls from it."""

    # The workers' end. Messages of a worker, and of the run's fork server on a worker's end, in their order.
    connection: socket.socket
    stdout: int  # what workers write to
    stderr: int
    life: int  # read end of the caller's life pipe
    pid: int = -1  # the worker; -1 for none
    status: int = 0  # how it ended
    peak_bytes: int = 0  # how much memory it had
    group_deadline: float = 0.0  # when what is left of its group is ended

    def descriptors(self) -> list[int]:
        return [self.connection.fileno(), self.stdout, self.stderr, self.life]


class _RunServer:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines: list[_Line] = []
        self._ended: list[_Line] = []  # whose worker is gone, and not yet its children
        self._life, self._life_end = os.pipe2(os.O_CLOEXEC)
        self._folders = identity.installed_folders(sys.path)
        self._modules = 0
        self._is_draining = False

    def run(self) -> None:
        """Serve until the caller is gone or has enough."""
        self._loop = Loop(self._on_child, MANY_FORKS)
        self._selector = self._loop.selector
        self._selector.register(self._connection, selectors.EVENT_READ, self._on_message)
        threads.prepare(os.environ)
        self._modules = len(sys.modules)
        self._loop.settle()
        sockets.send(self._connection, {"ready": os.getpid()})
        try:
            while self._lines or not self._is_draining:
                for key in self._loop.wait(_TICK_S if self._ended else None):
                    key.data()
                self._end_groups()
        except sockets.Gone:
            return
        finally:
            self._end_all()

    def _on_message(self) -> None:
        message, descriptors = sockets.receive(self._connection)
        if "line" in message:
            line, *others = descriptors
            connection = socket.socket(fileno=line)
            self._lines.append(_Line(connection, *others))
            self._watch(self._lines[-1])
        elif "drain" in message:
            self._is_draining = True
        else:
            self._signal(message)

    def _signal(self, message: Mapping[str, Any]) -> None:
        if any(line.pid == message["pid"] for line in self._lines):
            with suppress(ProcessLookupError):
                if message["signal"] == signal.SIGKILL:
                    end_group(message["pid"])  # its resource tracker has files to remove
                else:
                    os.kill(message["pid"], message["signal"])

    def _watch(self, line: _Line) -> None:
        self._selector.register(line.connection, selectors.EVENT_READ, partial(self._on_call, line))

    def _on_call(self, line: _Line) -> None:
        """Fork a worker, which reads the call itself."""
        self._selector.unregister(line.connection)
        if sockets.is_closed(line.connection):
            self._forget(line)
            return
        release_openmp_threads()
        variables = sockets.peeked(line.connection).get("env", {})
        guard_rules.prepare({**os.environ, **variables})
        if identity.are_gpus_named(variables):
            libraries.load_for_gpus()
        try:
            line.pid = child.fork_process(partial(self._work, line), "flower-gpu: a worker", _HANDLED)
            self._loop.forked()
        except OSError as error:
            with suppress(sockets.Gone):
                for descriptor in sockets.receive(line.connection)[1]:
                    os.close(descriptor)
                sockets.send(line.connection, {"event": "no_worker", "error": explained(error)})
            self._watch(line)

    def _work(self, line: _Line) -> None:
        """Be a worker (in the fork)."""
        self._loop.leave()
        guard_rules.leave(but_next=True)
        self._connection.close()
        for other in self._lines:
            if other is not line:
                other.connection.close()
                for descriptor in other.descriptors()[1:]:
                    os.close(descriptor)
        imported = partial(libraries.imported_since, self._modules, self._folders)
        lives = (line.life, self._life)
        _do_calls(line.connection, line.stdout, line.stderr, lives, self._life_end, imported)

    def _forget(self, line: _Line) -> None:
        self._lines.remove(line)
        line.connection.close()
        for descriptor in (line.stdout, line.stderr, line.life):
            os.close(descriptor)

    # The ends of workers

    def _on_child(self) -> None:
        self._loop.clear()
        for line in self._lines:
            if line.pid >= 0 and line not in self._ended:
                pid, status, usage = os.wait4(line.pid, os.WNOHANG)
                if pid:
                    line.status, line.peak_bytes = status, usage.ru_maxrss << 10
                    line.group_deadline = time.monotonic() + _CHILDREN_GRACE_S
                    self._ended.append(line)
        self._end_groups()
        self._end_sessions()

    def _end_groups(self) -> None:
        """Let go of workers of which nothing is left; end what has been left for too long."""
        for line in list(self._ended):
            late_s = time.monotonic() - line.group_deadline
            if _is_left(line.pid):
                # Children of this process: the id is theirs.
                trackers, others = end_group(line.pid) if late_s > 0 else ([], [])
                if late_s < _KILLED_GRACE_S and (others or not trackers):
                    continue
            self._ended.remove(line)
            event = {
                "event": "exited",
                "pid": line.pid,
                "status": os.waitstatus_to_exitcode(line.status),
                "peak_bytes": line.peak_bytes,
            }
            socket_folder.remove(line.pid)
            line.pid = -1
            try:
                sockets.send(line.connection, event)
                self._watch(line)
            except sockets.Gone:
                self._forget(line)

    def _end_sessions(self) -> None:
        """End what workers that are gone had put into sessions of their own."""
        workers = {line.pid for line in self._lines if line.pid >= 0}
        self._loop.end_left(workers)

    def _end_all(self) -> None:
        for line in self._lines:
            if line.pid >= 0:
                end_group(line.pid)
        for line in self._lines:
            if line.pid >= 0 and line not in self._ended:
                with suppress(ChildProcessError):
                    os.waitpid(line.pid, 0)
        deadline = time.monotonic() + _KILLED_GRACE_S
        while self._loop.end_left() and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        for line in self._lines:
            if line.pid >= 0:
                socket_folder.remove(line.pid)


def _is_left(group: int) -> bool:
    """Tell whether this process has children in a group. Those of a worker that is gone are its own."""
    try:
        while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
            pass
    except ChildProcessError:
        return False
    return True


# Its workers


def may_stay() -> bool:
    """Tell whether this process may get another call after the one that runs."""
    return _may_stay


def leave_after_this_call() -> None:
    """Let no further call have this worker."""
    global _has_to_leave
    _has_to_leave = True


def _do_calls(
    line: socket.socket,
    stdout: int,
    stderr: int,
    lives: Sequence[int],
    servers_end: int,
    imported: Callable[[], list[str]],
) -> None:
    """Do the calls that come on a line, until one of them was the last.

    ``line``: calls come from it, and what they tell goes to it.
    ``lives``: read ends of the life pipes of caller and server: when one of these is gone, so is this process
    group.
    ``servers_end``: write end of the run's fork server's, which a fork has as well.
    ``imported``: returns the libraries that calls have imported; the next server will have them.
    """
    for pipe in lives:
        # Its own description of the pipe: whom the kernel signals belongs to the description.
        own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        die_with_the_caller(own)
        os.close(pipe)
    os.close(servers_end)
    adopt_orphans()  # while this process lives, what it has started stays below it
    socket_folder.take()
    be_killed_first()
    cuda_answers.ask_cuda()
    os.dup2(stderr, 2)
    os.dup2(stdout, 1)
    for descriptor in (stdout, stderr):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Without a lock: each message is sent as a whole, and a child that the task forks could find it taken.
    send = partial(sockets.send, line)
    told: list[str] = []

    def tell_imported() -> None:
        nonlocal told
        names = imported()
        if names != told:
            told = names
            send({"event": "imported", "names": names})

    modules = events.ImportedModules(tell_imported)
    calls = select.poll()
    calls.register(line, select.POLLIN)
    while True:
        try:
            # First this, then the message: if this process is killed in between, the message is still there,
            # and the caller knows whom it had.
            if not calls.poll(_IDLE_S * 1000):
                child.be_idle()
            if not line.recv(1, socket.MSG_PEEK):
                break
            send({"event": "started", "pid": os.getpid()})
            message, descriptors = sockets.receive(line)
        except (sockets.Gone, OSError):
            break
        if "leave" in message:
            break
        say = _Say(send)
        with events.imports_seen_by(modules.look):
            stays, cpu_s = _do(message, descriptors, say)
        tell_imported()
        if stays is not None:
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            figures = {"peak_bytes": peak_bytes, "task_at": say.task_at, "cpu_s": cpu_s}
            send({"event": "result", "stays": stays, **figures})
        if not stays:
            break
    child.leave()


class _Say:
    """Tells the caller what a task tells; when it began goes with the result, as each message takes time."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self.task_at: float | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "task_started":
            self.task_at = time.time()
        else:
            self._send(event)


def _do(message: Mapping[str, Any], descriptors: list[int], send: Any) -> tuple[bool | None, float | None]:
    """Do one call; tell whether another one may come, None if this one has no result, and its CPU seconds."""
    global _may_stay
    _may_stay = bool(message["stays"])
    request, reply, *others = descriptors
    more = dict(zip(message["more"], others, strict=True))
    child.keep_for_caller(more.get("held", -1))  # open until the end of the call
    shared = more.get("shared", -1)
    sys.argv[:] = ["-c", f"flower-gpu: {message['label']}"]
    os.environ.update(message["env"])
    load = partial(transport.read_request, request, shared)
    outcome = child.run_task(message["env"], message["setup"], load, send)
    if outcome is None:
        return None, None
    child.leave_reply(outcome, reply)
    stays = _may_stay
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the task has closed or replaced it
            stays = False
    for descriptor in {*descriptors} - {shared}:
        os.close(descriptor)
    # After an error much may be different from what the next client expects to find.
    return stays and outcome.error_type is None and not _has_to_leave, outcome.cpu_s
