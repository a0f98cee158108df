"""The caller's side of the fork server: find a server, start one if needed, and have a worker forked.

The problem: a server must fit its caller, and the caller cannot know in advance which variables the server's
libraries read. So the caller asks, and tries another server if the answer is no.

Steps of :func:`find`: compute the name of a server (:func:`.identity.server_name`), connect to its socket,
and send the record of the call. The server answers in one of these ways:

- ``fit``: the connection becomes a :class:`ServerPlace`, which forks one worker at a time.
- ``wait``: the server is importing libraries that this call needs. The caller pauses and asks again.
- ``variables`` and ``without``: the server does not fit. Its libraries have read other values of the listed
  variables, or would hide the listed modules of the caller. The caller adds both lists to the name of its
  server (:class:`_ServerKind`), and looks for a server with that name.
- ``unfit``, or no answer because the server has ended: the caller tries again, up to ``_TRIES`` times.

A server with preloaded data is a fork of a server without data. If it is missing, the caller first finds a
server without data that fits. Otherwise, the data might be loaded for hours into a server that does not fit
(:func:`_connected`).

Threads: every thread that makes calls may use this module. What the process has found out about servers is
shared, behind a lock (:class:`_Memory`). A :class:`ServerPlace` belongs to one call at a time.

Races:

- Two processes may want to start the same server. A file lock decides (:func:`.sockets.locked`). The second
  process connects to the server that the first one has started.
- A server may hang, for example because it was stopped. A caller that gets no answer kills it, so that a new
  server can take its place (:func:`_end_if_it_hangs`).
- A fork of this process must not use the connections of its parent, so it starts with an empty memory.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

from flower_gpu.errors import WorkerStartError
from flower_gpu.gpu import device_files
from flower_gpu.options import CONFINED_VARIABLE, RUN_DIR_VARIABLE, SERVER_IDLE
from flower_gpu.unkillable import KILLED_S
from flower_gpu.workers import messages, own_process, threads
from flower_gpu.workers.call import Call, task_key
from flower_gpu.workers.forkserver import identity, program, sockets
from flower_gpu.workers.forkserver.control import Stays
from flower_gpu.workers.forkserver.identity import Inherited
from flower_gpu.workers.forkserver.waiting import Wait
from flower_gpu.workers.interrupts import allowed_interrupts
from flower_gpu.workers.messages import Gone

# Seconds of silence after which a server is assumed to hang. A busy server sends messages meanwhile.
_ANSWER_S = 20.0
_SAY_S = 5.0  # seconds of silence before a warning in the log
_TRIES = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.2  # between two requests while the server imports libraries

#: Seconds to wait for libraries that the worker would otherwise import itself.
LEARN_S = 60.0
#: The same for a worker with a time limit, because its own imports would use up that time. It is as long as
#: a server's own time limit for importing.
LEARN_FOR_LIMITED_S = 300.0

_log = logging.getLogger("flwr.flower_gpu")


@cache
def is_supported() -> bool:
    """Return True if this system can run the fork server. It needs Linux 5.3."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    with suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


@dataclass
class _ServerKind:
    """The properties of the servers that fit this process, as far as the process knows them."""

    variables: set[str] = field(default_factory=set)  # environment variables that libraries read
    without: set[str] = field(default_factory=set)  # libraries that the server must not have

    def name(self, environ: Mapping[str, str], more: Any = None) -> str:
        """Return the name of the server of this kind. ``more``: further parts of its identity."""
        return identity.server_name(environ, self.variables, self.without, more)

    def start(self, name: str, preload: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the fields of :class:`~.forking.Start` for a server of this kind."""
        idle_s = SERVER_IDLE.resolve(None, os.environ)
        return {"name": name, "idle_s": idle_s, "without": sorted(self.without), "preload": preload}


class _Memory:
    """Memory of a process between calls. A fork of the process starts with an empty memory."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self._begin_again)

    def begin(self) -> None:
        """Start with an empty memory."""
        self.lock = threading.Lock()
        self.kind = _ServerKind()
        self.stays = Stays()

    def _begin_again(self) -> None:
        self.stays.close()
        self.begin()

    def known_kind(self) -> _ServerKind:
        """Return a copy of the knowledge so far."""
        with self.lock:
            return _ServerKind(set(self.kind.variables), set(self.kind.without))


_memory = _Memory()


class ServerPlace:
    """A connection to a fork server that fits a call and similar calls. It has one worker at a time."""

    def __init__(self, connection: socket.socket, call: Call) -> None:
        self._connection = connection
        self._like = likeness(call)

    def is_for(self, call: Call) -> bool:
        """Return True if the server is still running and also fits ``call``."""
        return likeness(call) == self._like and not messages.is_closed(self._connection)

    def fork(self, message: dict[str, Any], descriptors: Sequence[int]) -> Forked:
        """Send a request for a fork with descriptors, and return the forked process.

        Raises WorkerStartError if the system does not let the server start another process.
        Raises Gone as :meth:`ask` does.
        """
        answer = self.ask(message, descriptors)
        if "error" in answer:
            raise WorkerStartError(f"cannot start a worker: {answer['error']}")
        return Forked(answer["pid"], self)

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises Gone if the server has ended or hangs. This place then forks no more workers.
        """
        try:
            return ask(self._connection, message, descriptors)
        except Gone:
            # The server must see a closed connection, too.
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def close(self) -> None:
        """Close the connection. The server then forgets the call."""
        self._connection.close()


def likeness(call: Call) -> tuple[Any, ...]:
    """Return a key that is equal for calls that can share a worker or a place."""
    return (dict(call.env), call.setup, call.without, list(call.preload), call.confinement)


class Forked:
    """A process that a fork server has forked for this process."""

    #: Reason for which :meth:`reap` may not know how the process ended.
    why_unknown = "the fork server that forked it was ended before it"

    def __init__(self, pid: int, place: ServerPlace) -> None:
        self.pid = pid
        #: Peak memory of the process in bytes, set by :meth:`reap`. 0 if unknown.
        self.peak_bytes = 0
        self._place = place
        try:
            # The pid still belongs to this process, because the server reaps it only on request.
            self.pidfd = os.pidfd_open(pid)
        except OSError as error:
            place.close()
            raise WorkerStartError(f"cannot watch the worker (pid {pid}): {error}") from error

    def has_exited(self) -> bool:
        """Return True if the process has exited. Its pid stays reserved until :meth:`reap`."""
        return messages.can_be_read(self.pidfd, 0)

    def reap(self, imported: Sequence[str] = ()) -> int | None:
        """Release the pid, and return the exit status, or None if the server has ended.

        ``imported``: modules that the process had to import itself.
        """
        try:
            answer = self._place.ask({"op": "reap", "imported": list(imported)})
        except Gone:
            return None
        finally:
            os.close(self.pidfd)
        self.peak_bytes = answer["peak_bytes"]
        exitcode: int = answer["exitcode"]
        return exitcode


def find(call: Call, deadline: float | None, variables: Mapping[str, str]) -> ServerPlace:
    """Return a place at a fork server that fits ``call``. Start a server unless one is running.

    ``variables``: environment variables that the task's module is known to set. The worker starts with them,
    and the libraries of its server must have read the same values.

    Raises WorkerStartError if no server fits.
    Raises TimeoutError after ``deadline`` (of ``time.monotonic``).
    """
    inherited = Inherited.of_this_process({**variables, **call.env})
    offer = {
        # The record contains digests instead of values, because all later forks inherit the memory of the
        # server. Only the worker gets the values.
        "digests": identity.digests(inherited.environ, inherited.environ),
        "threads": threads.variables(inherited.environ),
        "path": [*(call.confinement.packages() if call.confinement else ()), *inherited.path],
        "is_confined": CONFINED_VARIABLE in call.env,
        "is_on_gpu": bool(call.env.get(identity.VISIBLE_DEVICES)),
        "setup": call.setup,
        "kind": _kind(call.keys, inherited.environ),
    }
    folder = settings = -1
    try:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        settings = messages.memory_file({"inherited": asdict(inherited), "env": dict(call.env)})
        patience = time.monotonic() + LEARN_S
        tries, pause_s, wait = 0, _FIRST_PAUSE_S, Wait()
        while tries < _TRIES:
            kind = _memory.known_kind()
            kind.without |= call.without
            try:
                name, connection = _connected(kind, call, inherited, folder, deadline, wait)
            except Gone:
                # The server ended right after its start, or it hangs.
                tries += 1
                continue
            now = time.monotonic() > patience
            message = {"op": "open", "now": now, "record": offer}
            answer = _ask_or_end(name, connection, message, [folder, settings], deadline, wait)
            if "fit" in answer:
                _memory.stays.ask(name)
                return ServerPlace(connection, call)
            connection.close()
            if "wait" in answer:
                _pause(wait, f"{_importing(answer['wait'])}, for at most {LEARN_S:g} s", deadline, pause_s)
                pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)
                continue
            tries += 1
            if "variables" in answer:
                _remember(kind, answer)
    finally:
        for descriptor in {folder, settings} - {-1}:
            os.close(descriptor)
    raise WorkerStartError(
        f"no fork server fits this process after {_TRIES} tries: they ended, or had read other values of its "
        "environment variables. Use start_method='spawn'"
    )


def _kind(names: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a name for the calls of these tasks in this run.

    Calls with the same name import the same libraries, even if they come from different processes.
    """
    return json.dumps([environ.get(RUN_DIR_VARIABLE), *names])


def learn(
    names: Sequence[str],
    without: frozenset[str] = frozenset(),
    patience_s: float = LEARN_S,
    tasks: Sequence[str] = (),
) -> None:
    """Have the fork server of this process import libraries now, so that workers do not have to.

    Blocks until the server has imported them, or for ``patience_s`` seconds. A worker still imports modules
    that the server cannot import, and modules outside of installed packages.

    ``tasks``: names of the tasks that need the libraries in this run. Their workers wait for the import, too.
    """
    patience, wait = time.monotonic() + patience_s, Wait()
    keys = [task_key(task) for task in tasks]
    missing = list(names)
    while time.monotonic() < patience:
        kind = _memory.known_kind()
        kind.without |= without
        environ = own_process.environment({})
        with (
            suppress(Gone),  # A successor may be taking over at this moment.
            _connect_or_start(kind, environ, patience, wait) as connection,
        ):
            message = {"op": "learn", "names": list(names), "kind": _kind(keys, environ)}
            missing = ask(connection, message)["learning"]
            if not missing:
                return
        _pause(wait, f"{_importing(missing)}, for at most {patience_s:g} s", None, _FIRST_PAUSE_S)


def _ask_or_end(
    name: str,
    connection: socket.socket,
    message: dict[str, Any],
    descriptors: Sequence[int],
    deadline: float | None,
    wait: Wait,
) -> dict[str, Any]:
    """Send a request and return the answer. If the server hangs, kill it and return an empty answer."""

    def in_line() -> None:
        _pause(wait, "the fork server serves other callers first", deadline, 0)

    try:
        return ask(connection, message, descriptors, in_line, waiting=allowed_interrupts)
    except Gone:
        _end_if_it_hangs(name, connection)
        return {}
    except BaseException:
        connection.close()
        raise


def _importing(libraries: Sequence[str]) -> str:
    return f"the fork server imports {', '.join(libraries)}"


def _pause(wait: Wait, reason: str, deadline: float | None, pause_s: float) -> None:
    """Sleep for ``pause_s`` seconds. Raises TimeoutError with the reason for the wait after ``deadline``."""
    if deadline is not None and time.monotonic() > deadline:
        raise TimeoutError(reason)
    wait.say(reason)
    # A Ctrl-C that has arrived meanwhile is raised now.
    with allowed_interrupts():
        time.sleep(pause_s)


def ask(
    connection: socket.socket,
    message: dict[str, Any],
    descriptors: Sequence[int] = (),
    in_line: Callable[[], None] = lambda: None,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """Send a message and return the answer (:func:`messages.receive_answer`).

    ``in_line``: called for each message by which the server says that it is busy.
    ``waiting``: returns a context manager, which is entered while this function waits for a silent server.

    Raises Gone if the server hangs.
    """
    messages.send(connection, message, descriptors)
    with waiting():
        has_answered = messages.can_be_read(connection.fileno(), _SAY_S)
    if not has_answered:
        _log.warning(
            "the fork server (pid %d) has not answered for %g s: it is stopped (kill -CONT continues it), or "
            "the host is overloaded. After another %g s, it is killed and a new one is started",
            *(messages.peer(connection)[0], _SAY_S, _ANSWER_S),
        )
        with waiting():
            has_answered = messages.can_be_read(connection.fileno(), _ANSWER_S)
        if not has_answered:
            raise Gone("no answer")
    return messages.receive_answer(connection, in_line)


def _remember(kind: _ServerKind, answer: dict[str, Any]) -> None:
    """Add the variables and modules of an answer to the memory of this process.

    Raises WorkerStartError if ``kind`` has them all. Another try would then get the same answer.
    """
    variables, without = set(answer["variables"]), set(answer["without"])
    if variables <= kind.variables and without <= kind.without:
        hidden = ", ".join(sorted(without)) or ", ".join(sorted(variables))
        raise WorkerStartError(
            f"the fork server needs its own {hidden}, and this process has another one. "
            "Use start_method='spawn'"
        )
    with _memory.lock:
        _memory.kind.variables |= variables
        _memory.kind.without |= without


def _connected(
    kind: _ServerKind, call: Call, inherited: Inherited, folder: int, deadline: float | None, wait: Wait
) -> tuple[str, socket.socket]:
    """Connect to a server of this kind that holds the call's preloaded data. Return its name, too."""
    environ = inherited.environ
    if not call.preload:
        return kind.name(environ), _connect_or_start(kind, environ, deadline, wait)
    if call.confinement is not None:
        raise WorkerStartError(
            "preload= cannot be used with --confine: its functions run in the fork server, which is not "
            "confined. Remove one of the two"
        )
    # If the server is missing, it is forked from a base, which is a server without preloaded data. The base
    # must fit the call before the preload functions run. Otherwise, they would load the data into a server
    # that no worker of this call can use.
    with suppress(Gone):
        name = _name_with_data(kind, call, inherited)
        return name, sockets.connect(name, _ANSWER_S)
    base = find(replace(call, preload=()), deadline, environ)
    try:
        # While looking for the base, this process may have learned which variables libraries read. They are
        # part of the name, so the name is computed again.
        kind = _memory.known_kind()
        kind.without |= call.without
        name = _name_with_data(kind, call, inherited)
        start = partial(
            _load_data, base, kind.start(name, list(call.preload)), inherited, folder, deadline, wait
        )
        # The start has no time limit, because the user's functions may load data for hours.
        return name, _connect_or(start, name, deadline, wait)
    finally:
        base.close()


def _name_with_data(kind: _ServerKind, call: Call, inherited: Inherited) -> str:
    """Return the name of the server that holds the call's preloaded data."""
    return kind.name(inherited.environ, [list(call.preload), inherited.path, os.getcwd()])


def _load_data(
    base: ServerPlace,
    start: Mapping[str, Any],
    inherited: Inherited,
    folder: int,
    deadline: float | None,
    wait: Wait,
    lock: int,
) -> None:
    """Have the server of ``base`` fork a server that calls the preload functions; wait until it is ready.

    ``start``: fields of its :class:`~flower_gpu.workers.forkserver.forking.Start`.
    ``lock``: descriptor of the start lock, which this process holds.
    """
    what = "preload " + ", ".join(function for function, _ in start["preload"])
    with (
        open(messages.memory_file(asdict(inherited)), "rb") as settings,
        program.said_ready(deadline, None, what, wait) as ready,
    ):
        base.ask({"op": "preload", "start": start}, [folder, ready, lock, settings.fileno()])


def _connect_or_start(
    kind: _ServerKind, environ: Mapping[str, str], deadline: float | None, wait: Wait
) -> socket.socket:
    """Connect to a server without preloaded data. Start it if it is not running.

    Raises WorkerStartError if another process holds the start lock of that server for too long.
    """
    name = kind.name(environ)

    def start(lock: int) -> None:
        if device_files.are_limited(os.environ) and device_files.of_host(os.environ):
            raise WorkerStartError(
                "a worker under the GPU guard cannot start a fork server: all workers of the account would "
                "be limited to the GPUs of this one. Use start_method='spawn' within workers"
            )
        program.start(kind.start(name), environ, deadline, lock, wait)

    limit = time.monotonic() + program.LONGEST_START_S
    try:
        return _connect_or(start, name, limit if deadline is None else min(deadline, limit), wait)
    except sockets.BeingStartedError as error:
        if deadline is not None and time.monotonic() > deadline:
            raise
        raise WorkerStartError(f"{error}, for more than {program.LONGEST_START_S:g} s") from error


def _connect_or(start: Callable[[int], None], name: str, deadline: float | None, wait: Wait) -> socket.socket:
    with suppress(Gone):
        return sockets.connect(name, _ANSWER_S)
    with sockets.locked(name, deadline, wait.say) as lock:
        # Another process may have started the server while this one waited for the lock.
        with suppress(Gone):
            return sockets.connect(name, _ANSWER_S)
        sockets.name_starter(lock)
        start(lock)
        return sockets.connect(name, _ANSWER_S)


def _end_if_it_hangs(name: str, connection: socket.socket) -> None:
    """Kill a server that has accepted a connection but does not answer, so that a new one can start.

    The kernel may be unable to kill the server at once (:mod:`flower_gpu.unkillable`). Its socket would still
    accept connections, so the socket file is removed. The command line of such a process is never read,
    because the read could block as well.
    """
    if messages.is_closed(connection):
        return
    with suppress(OSError):
        pid, _ = messages.peer(connection)
        pidfd = os.pidfd_open(pid)
        try:
            # The server may have ended, and another process may have its pid.
            if sockets.is_server(pid):
                socket_file = sockets.identity(name)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if not messages.can_be_read(pidfd, KILLED_S):
                    sockets.remove(name, socket_file)
        finally:
            os.close(pidfd)
