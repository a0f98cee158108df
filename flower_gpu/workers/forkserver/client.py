"""The caller's side of the fork server: find it, start it where there is none, have a worker forked."""

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
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from flower_gpu.errors import WorkerStartError
from flower_gpu.gpu import device_files, guard
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

_ANSWER_S = 20.0  # a server that is silent for so long hangs; a busy one tells callers to wait
_SAY_S = 5.0  # until the user is told what is waited for
_TRIES = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.2  # between questions whether the libraries are there

#: How long to wait for libraries that the worker would have to import itself.
LEARN_S = 60.0
#: The same where the worker has a time limit, which its own imports would use up: as long as a server tries.
LEARN_FOR_LIMITED_S = 300.0

_log = logging.getLogger("flwr.flower_gpu")


@cache
def is_supported() -> bool:
    """Tell whether this system can run the fork server (Linux 5.3)."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    with suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


@dataclass
class _ServerKind:
    """What this process has found out about the servers that fit it."""

    variables: set[str] = field(default_factory=set)
    without: set[str] = field(default_factory=set)

    def name(self, environ: Mapping[str, str], more: Any = None) -> str:
        return identity.server_name(environ, self.variables, self.without, more)

    def start(self, name: str, preload: Sequence[Any] = ()) -> dict[str, Any]:
        idle_s = SERVER_IDLE.resolve(None, os.environ)
        return {"name": name, "idle_s": idle_s, "without": sorted(self.without), "preload": preload}


class _Memory:
    """What a process remembers between calls; a fork of it starts with nothing."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self._begin_again)

    def begin(self) -> None:
        """Remember nothing."""
        self.lock = threading.Lock()
        self.kind = _ServerKind()
        self.stays = Stays()

    def _begin_again(self) -> None:
        self.stays.close()
        self.begin()

    def known_kind(self) -> _ServerKind:
        """Return a copy of the present knowledge."""
        with self.lock:
            return _ServerKind(set(self.kind.variables), set(self.kind.without))


_memory = _Memory()


class ServerPlace:
    """A fork server that is good for a call and others like it, and forks one worker for them at a time."""

    def __init__(self, connection: socket.socket, call: Call) -> None:
        self._connection = connection
        self._like = likeness(call)

    def is_for(self, call: Call) -> bool:
        """Tell whether the server is there, and as good for another call."""
        return likeness(call) == self._like and not messages.is_closed(self._connection)

    def fork(self, message: dict[str, Any], descriptors: Sequence[int]) -> Forked:
        """Have the server fork by this message, with these descriptors.

        WorkerStartError if the system lets the server start no more processes; Gone as of :meth:`ask`.
        """
        answer = self.ask(message, descriptors)
        if "error" in answer:
            raise WorkerStartError(f"cannot start a worker: {answer['error']}")
        return Forked(answer["pid"], self)

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Ask the server something; Gone if it has ended or hangs, and then it forks nothing more here."""
        try:
            return ask(self._connection, message, descriptors)
        except Gone:
            with suppress(OSError):  # so that it is closed for both
                self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def close(self) -> None:
        """Let go of the server; it forgets the call."""
        self._connection.close()


def likeness(call: Call) -> tuple[Any, ...]:
    """Return the key of calls that can share a worker, or a place."""
    return (dict(call.env), call.setup, call.without, list(call.preload), call.confinement)


class Forked:
    """A process that the fork server has forked for this one."""

    #: Why :meth:`reap` may not know how it ended.
    why_unknown = "the fork server that forked it was ended before it"

    def __init__(self, pid: int, place: ServerPlace) -> None:
        self.pid = pid
        #: The most memory that it had, once it is reaped; 0 where that is not known.
        self.peak_bytes = 0
        self._place = place
        try:
            self.pidfd = os.pidfd_open(pid)  # still its own: the server reaps when it is told to
        except OSError as error:
            place.close()
            raise WorkerStartError(f"cannot watch the worker (pid {pid}): {error}") from error

    def has_exited(self) -> bool:
        """Whether it is gone; its pid is still its own."""
        return messages.can_be_read(self.pidfd, 0)

    def reap(self, imported: Sequence[str] = ()) -> int | None:
        """Give its pid back and return the exit status, or None if the server has ended."""
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
    """Find a fork server for ``call``, or start one; WorkerStartError, or TimeoutError after ``deadline``.

    ``variables``: what the task's module sets in the environment, as far as that is known: found there by the
    worker already, and by the libraries of its server.
    """
    inherited = Inherited.of_this_process({**variables, **call.env})
    offer = {
        # Values of variables are the worker's alone: all later forks have what the server has read.
        "digests": identity.digests(inherited.environ, inherited.environ),
        "threads": threads.variables(inherited.environ),
        "path": [*(call.confinement.packages() if call.confinement else ()), *inherited.path],
        "is_confined": CONFINED_VARIABLE in call.env,
        "is_on_gpu": bool(call.env.get(identity.VISIBLE_DEVICES)),
        "setup": call.setup,
        "kind": _kind(call.keys, inherited.environ),
    }
    folder = own = -1
    try:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        own = messages.memory_file({"inherited": asdict(inherited), "env": dict(call.env)})
        patience = time.monotonic() + LEARN_S
        tries, pause_s, wait = 0, _FIRST_PAUSE_S, Wait()
        while tries < _TRIES:
            kind = _memory.known_kind()
            kind.without |= call.without
            try:
                name, connection = _connected(kind, call, inherited, folder, deadline, wait)
            except Gone:  # it ended again at once, or hangs
                tries += 1
                continue
            now = time.monotonic() > patience
            message = {"op": "open", "now": now, "record": offer}
            answer = _ask_or_end(name, connection, message, [folder, own], deadline, wait)
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
        for descriptor in {folder, own} - {-1}:
            os.close(descriptor)
    raise WorkerStartError(
        f"no fork server fits this process after {_TRIES} tries: they ended, or had read other values of its "
        "environment variables. Use start_method='spawn'"
    )


def _kind(names: Sequence[str], environ: Mapping[str, str]) -> str:
    """Name the calls of these tasks in this run: also of callers that come and go, they import the same."""
    return json.dumps([environ.get(RUN_DIR_VARIABLE), *names])


def learn(
    names: Sequence[str],
    without: frozenset[str] = frozenset(),
    patience_s: float = LEARN_S,
    tasks: Sequence[str] = (),
) -> None:
    """Have the fork server of this process import libraries now, so that no worker has to.

    Returns once the server has them, or after ``patience_s``. Workers import those that the server cannot
    import, and those that do not belong to an installed package.

    ``tasks``: names of the tasks whose calls in this run need the libraries. Workers for them wait, too.
    """
    patience, wait = time.monotonic() + patience_s, Wait()
    keys = [task_key(task) for task in tasks]
    missing = list(names)
    while time.monotonic() < patience:
        kind = _memory.known_kind()
        kind.without |= without
        environ = own_process.environment({})
        with (
            suppress(Gone),  # a successor has taken its place just now
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
    """Ask a server and return its answer; a server that is silent is killed, and the answer is empty."""

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
    """Pause within a wait; TimeoutError with the reason for the wait after ``deadline``."""
    if deadline is not None and time.monotonic() > deadline:
        raise TimeoutError(reason)
    wait.say(reason)
    with allowed_interrupts():  # a Ctrl-C that has arrived is raised now
        time.sleep(pause_s)


def ask(
    connection: socket.socket,
    message: dict[str, Any],
    descriptors: Sequence[int] = (),
    in_line: Callable[[], None] = lambda: None,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """Send a message and wait for the answer (:func:`messages.receive_answer`); Gone if the server hangs.

    ``waiting``: a context for the wait of a server that is silent.
    """
    messages.send(connection, message, descriptors)
    with waiting():
        has_answered = messages.can_be_read(connection.fileno(), _SAY_S)
    if not has_answered:
        _log.warning(
            "the fork server (pid %d) has not answered for %g s: it is stopped (kill -CONT lets it go on), "
            "or the host has too much to do. It is ended after another %g s, and a new one started",
            *(messages.peer(connection)[0], _SAY_S, _ANSWER_S),
        )
        with waiting():
            has_answered = messages.can_be_read(connection.fileno(), _ANSWER_S)
        if not has_answered:
            raise Gone("no answer")
    return messages.receive_answer(connection, in_line)


def _remember(kind: _ServerKind, answer: dict[str, Any]) -> None:
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
    """Connect to a server of this kind, and of the call's preloaded data."""
    environ = inherited.environ
    if not call.preload:
        return kind.name(environ), _connect_or_start(kind, environ, deadline, wait)
    if call.confinement is not None:
        raise WorkerStartError(
            "preload= cannot be used with --confine: its functions run in the fork server, which is not "
            "confined. Remove one of the two"
        )
    preload = list(call.preload)
    name = kind.name(environ, [preload, inherited.path, os.getcwd()])
    what = "preload " + ", ".join(function for function, _ in preload)

    def derive(lock: int) -> None:
        message = {"op": "preload", "start": kind.start(name, preload)}
        with (
            open(messages.memory_file(asdict(inherited)), "rb") as own,
            program.said_ready(deadline, None, what, wait) as ready,
            _connect_or_start(kind, environ, deadline, wait) as base,
        ):
            descriptors = [folder, ready, lock, own.fileno()]
            if not _ask_or_end(kind.name(environ), base, message, descriptors, deadline, wait):
                raise Gone("the server with the libraries has ended")

    # Without a limit: the user's functions may load data for hours.
    return name, _connect_or(derive, name, deadline, wait)


def _connect_or_start(
    kind: _ServerKind, environ: Mapping[str, str], deadline: float | None, wait: Wait
) -> socket.socket:
    """Connect to a server with libraries only, which is started if there is none.

    Raises WorkerStartError if another process does not come to an end with the start of that server.
    """
    name = kind.name(environ)

    def start(lock: int) -> None:
        if guard.is_wanted(os.environ) and device_files.of_host(os.environ):
            raise WorkerStartError(
                "a worker under the GPU guard starts no fork server: all of the account's workers would be "
                "kept to the GPUs of this one. Use start_method='spawn' within workers"
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
        with suppress(Gone):  # somebody else was first
            return sockets.connect(name, _ANSWER_S)
        sockets.name_starter(lock)
        start(lock)
        return sockets.connect(name, _ANSWER_S)


def _end_if_it_hangs(name: str, connection: socket.socket) -> None:
    """Kill a server that has taken a connection but does not answer; a new one takes its place.

    Also where the kernel cannot kill it at once, see :mod:`flower_gpu.unkillable`: its socket would go on to
    take connections. For that reason its command line is not read either.
    """
    if messages.is_closed(connection):
        return
    with suppress(OSError):
        pid, _ = messages.peer(connection)
        pidfd = os.pidfd_open(pid)
        try:
            # Not another process that has got its pid.
            if sockets.is_server(pid):
                socket_file = sockets.identity(name)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if not messages.can_be_read(pidfd, KILLED_S):
                    sockets.remove(name, socket_file)
        finally:
            os.close(pidfd)
