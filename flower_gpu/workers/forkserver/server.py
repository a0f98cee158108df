"""The fork server itself: a process that has imported libraries, and forks a worker for each call.

The problem: each worker is a process, and importing its libraries takes long. A fork of a process with these
libraries does not import them again. But a fork also inherits all other state of its server, and has only the
thread that called ``fork``.

What a server may import: only libraries of installed packages, because a user's own modules may change while
the server runs. Preload functions are the user's, so they run in a server of their own, which drains when
their files are edited (:class:`~.fitness.UserFiles`). A library that starts a thread or initialises CUDA is
refused, because a fork could not use it (:mod:`.libraries`). Only the threads of pyarrow were seen to do no
harm. The server notes which environment variables its libraries read (:mod:`.fitness`). It forks only for
callers that would get the same result from their own imports.

The objects: :class:`Server` is one loop in one thread. It waits on the listening socket, on one connection
for each call (:class:`~.forking.Session`), on the pipe of a running trial, and for signals. A caller sends
``open`` with the record of its call, then ``fork`` or ``program``, and ``reap`` when the fork has exited. The
other operations are ``stay``, ``learn``, ``preload``, ``status`` and ``stop``. Each ``_on_<operation>``
method returns the answer.

How it learns: with ``reap``, a caller passes on the modules that its worker had to import itself. The server
forks a trial (:class:`~.libraries.Growth`), which imports these modules. Importing them in the server would
block its loop, and a harmful library could not be unloaded again. The next worker of the same caller, or of
the same kind of call, waits for the trial, but not for longer than the caller's patience.

Hand-over to a successor: if the trial did no harm, it takes over the listening socket and the connections of
processes that asked the server to stay, and writes ``null`` to its pipe. The old server then drains: it
closes its listening socket and ends when its last worker has exited. If the trial was harmful or died, the
server refuses the libraries to blame and goes on.

Races:

- The trial holds the listening socket before it can answer. If the server dies then, callers would connect
  and get no answer. So the trial ends with its parent until it serves (``end_with_parent``).
- A worker may report while the trial runs. The trial does not know of these modules, so the server keeps them
  and reports them to the successor after the hand-over.
- A draining server still gets reports. It passes them on to the server that listens under its name.
- An accepted connection that gets no answer looks as if the server hung, and the caller would kill it. So a
  busy server tells all waiting callers, about every half second, that it is busy.
- The pid of a reaped worker may soon belong to another process. A caller could kill that process by mistake.
  So the server reaps a worker only when its caller asks for that, or when the caller has ended.
- A fork runs in the middle of the server's loop. It raises :class:`~.forking.Become`, which unwinds the stack
  to :func:`.program.main`, so that the worker's stack does not contain the server's.
"""

from __future__ import annotations

import json
import multiprocessing.connection  # noqa: F401 - each worker needs it
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from flower_gpu import __version__, frameworks
from flower_gpu.errors import ConfigError
from flower_gpu.frameworks.cuda_answers import ANSWERS
from flower_gpu.workers import interpreter, messages, state_folder, threads
from flower_gpu.workers import worker as child
from flower_gpu.workers.call import load_task
from flower_gpu.workers.forkserver import attributes, identity, libraries, sockets
from flower_gpu.workers.forkserver.fitness import EnvironmentUse, Shadows, UserFiles
from flower_gpu.workers.forkserver.forking import READY, Become, Loop, Session, Start, become, describe
from flower_gpu.workers.forkserver.identity import Inherited
from flower_gpu.workers.forkserver.libraries import Growth, Learning
from flower_gpu.workers.life import adopt_orphans, die_with_the_caller, end_with_parent, explained
from flower_gpu.workers.own_process import facts
from flower_gpu.workers.threads import release_openmp_threads

_TICK_S = 1.0  # longest time between two checks of the clock and of the server's socket file
_TELL_S = 0.5  # shortest time between two messages to the callers in the queue
_POLL_S = 0.02
# Minimum time for which a new server waits for its first caller. The process that started the server connects
# at once, unless the host is busy. If the server ended before that, preloaded data would be loaded again.
_FIRST_CALLER_S = 60.0
# Seconds after which a trial is killed. A trial is a fork that imports the modules that workers reported.
_TRIAL_S = 300.0

_Message = Mapping[str, Any]
_Reply = dict[str, Any]


class Server:
    """A fork server: one loop over its listening socket, its connections and the exits of its workers."""

    def __init__(self, start: Start, use: EnvironmentUse, learning: Learning) -> None:
        self._start = start
        self._use = use
        self._learning = learning
        self._files = UserFiles()
        self._began = time.time()
        self._sessions: dict[int, Session] = {}
        self._orphans: set[int] = set()
        self._modules = self._calls = 0
        self._reported_busy_at = 0.0
        self._has_had_callers = False
        self._draining = self._has_successor = False

    def open(self, listener: socket.socket | None) -> None:
        """Prepare to serve on ``listener``, or on a new socket if it is None."""
        self._loop = Loop(self._on_signal)
        self._selector = self._loop.selector
        signal.signal(signal.SIGTERM, lambda *_: self._drain())
        self._listener = listener or sockets.listen(self._start.name)
        self._listener.setblocking(False)
        # A successor calls listen() again: the kernel shows clients the process that called it last as their
        # peer, and clients kill that process if it hangs.
        self._listener.listen(sockets.QUEUE)
        self._socket_file = sockets.identity(self._start.name)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for session in self._sessions.values():
            self._watch(session)
        self._shadows = Shadows()
        self._modules = len(sys.modules)
        self._last_use = time.monotonic()
        self._loop.settle()

    def run(self, ready: int, lock: int) -> None:
        """Report through ``ready`` that this server is open, release the start lock, and serve."""
        os.write(ready, READY)
        os.close(ready)
        os.close(lock)
        self._has_had_callers = False
        self.serve()

    def serve(self) -> None:
        """Serve until this server has been idle for its time limit, or has been told to stop."""
        while not self._has_ended():
            for key in self._loop.wait(_TICK_S):
                # The handler of an earlier key may have closed this connection.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
                if time.monotonic() - self._reported_busy_at > _TELL_S:
                    self._report_busy()
        deadline = time.monotonic() + _TICK_S
        while self._end_sessions() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        state_folder.remove_left_socket_folders()

    def _report_busy(self) -> None:
        """Send all callers in the queue, including new ones, a message that this server is busy."""
        self._reported_busy_at = time.monotonic()
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif session := self._sessions.get(key.fd):
                # The caller may have exited, or may not read its messages.
                with suppress(messages.Gone):
                    messages.send(session.connection, messages.BUSY)

    def _has_ended(self) -> bool:
        growth = self._learning.running
        # A trial does not count as a user, because its imports may never end.
        if self._callers() or self._orphans - ({growth.pid} if growth else set()):
            self._last_use, self._has_had_callers = time.monotonic(), True
        if not self._draining:
            idle_s = time.monotonic() - self._last_use
            limit_s = (
                self._start.idle_s if self._has_had_callers else max(self._start.idle_s, _FIRST_CALLER_S)
            )
            if idle_s > limit_s or sockets.identity(self._start.name) != self._socket_file:
                self._drain()
        if growth is not None and time.monotonic() > growth.deadline:
            self._end_growth()
        working = any(session.pid >= 0 for session in self._sessions.values())
        return self._draining and not working and self._learning.running is None

    def _callers(self) -> list[Session]:
        """Return the connections of proven callers. Other processes must not keep the server alive."""
        return [session for session in self._sessions.values() if session.is_proven]

    def _accept(self) -> None:
        # Accept all pending connections, because only an accepted caller can be told to wait.
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no more pending connections
                return
            caller, user = messages.peer(connection)
            if user != os.getuid():
                connection.close()
                continue
            session = Session(connection, caller)
            self._sessions[connection.fileno()] = session
            self._watch(session)

    def _watch(self, session: Session) -> None:
        session.connection.setblocking(False)
        self._selector.register(session.connection, selectors.EVENT_READ, partial(self._on_message, session))

    def _on_message(self, session: Session) -> None:
        descriptors: list[int] = []
        try:
            message, descriptors = messages.receive(session.connection)
            if not session.is_proven:
                session.is_proven = message == sockets.CALLER and sockets.is_proof(descriptors)
                if not session.is_proven:
                    raise messages.Gone("it may not be a caller")
                return
            handle = getattr(self, f"_on_{message.get('op')}", None)
            if handle is None:
                raise messages.Gone("not an operation")
            reply = handle(session, message, descriptors)
            if reply is not None:
                messages.send(session.connection, reply)
        except Become:
            # This is the fork, which still needs the descriptors.
            descriptors = []
            raise
        except Exception as error:
            # Whatever this connection sent, the server must go on with the others.
            if not isinstance(error, messages.Gone):
                # The disk with the log may be full.
                with suppress(OSError):
                    print(f"a request failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._forget(session)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _on_open(self, session: Session, message: _Message, descriptors: list[int]) -> _Reply:
        """Store the record of a coming call, and answer whether this server fits the call."""
        if session.folder >= 0:
            raise ValueError("open twice")
        session.folder, session.settings_file = descriptors
        descriptors.clear()  # The session closes them from now on, in a fork as well.
        session.record = message["record"]
        if not attributes.may_fork_for(session.caller):
            raise messages.Gone("its worker would have more privileges than the caller")
        requester = session.caller, session.record["kind"]
        if session.record["is_on_gpu"]:
            self._learning.ask_for_gpus(*requester)
            self._grow()
        if message.get("now"):
            self._learning.go_on_without(*requester)
        elif awaited := self._learning.awaited(*requester):
            return {"wait": awaited}
        if not self._is_as_it_was():
            return {"unfit": True}
        different = self._use.differs_from(session.record["digests"])
        hidden = self._shadows.hidden(session.record["path"], os.readlink(f"/proc/self/fd/{session.folder}"))
        if different or hidden:
            return {"variables": different, "without": hidden}
        # This module's function runs around the tasks of the caller's workers.
        libraries.import_own(session.record["setup"])
        return {"fit": True}

    def _is_as_it_was(self) -> bool:
        """Return True if this process is still fit for forks. Otherwise, drain."""
        is_as_it_was = not libraries.cuda_is_touched() and not self._files.edited()
        if not is_as_it_was:
            self._drain()
        return is_as_it_was

    def _on_fork(self, session: Session, message: _Message, descriptors: list[int]) -> _Reply:
        """Fork a worker, which gets its ends of the pipes and sockets to the caller."""
        ends = child.Ends(*descriptors)
        self._calls += 1

        def fork() -> int:
            work = partial(self._work, session, ends)
            is_confined = session.record["is_confined"]
            name = f"flower-gpu: {session.label}"
            return child.fork_process(work, name, own_session=is_confined, go_on=become)

        return self._forked(session, message, fork)

    def _on_program(self, session: Session, message: _Message, descriptors: list[int]) -> _Reply:
        """Fork a program, which gets the caller's standard streams."""

        def begin() -> None:
            self._be_program(session, message, *descriptors)

        def fork() -> int:
            kept = {session.folder, session.settings_file, *descriptors}
            return self._derive(kept, begin)

        return self._forked(session, message, fork)

    def _forked(self, session: Session, message: _Message, fork: Callable[[], int]) -> _Reply:
        if session.pid >= 0 or not session.record:
            raise ValueError("fork without open")
        if session.has_forked and (self._draining or not self._is_as_it_was()):
            raise messages.Gone("another server is better by now")
        # The user's preload functions may have started OpenMP threads.
        release_openmp_threads()
        threads.prepare(session.record["threads"])
        session.label, session.has_forked = message["label"], True
        try:
            session.pid = fork()
        except OSError as error:
            return {"error": explained(error)}
        self._loop.forks += 1
        return {"pid": session.pid}

    def _on_reap(self, session: Session, message: _Message, _: list[int]) -> _Reply:
        """Reap a worker that has exited, and answer with its exit code and peak memory."""
        if session.pid < 0:
            raise ValueError("reap without fork")
        status, usage = os.wait4(session.pid, 0)[1:]
        session.pid = -1
        # A process may have left the worker's process group only just now.
        self._end_sessions()
        self._note_imports(message["imported"], session.caller, session.record["kind"])
        return {"exitcode": os.waitstatus_to_exitcode(status), "peak_bytes": usage.ru_maxrss << 10}

    def _on_stay(self, session: Session, _: _Message, __: list[int]) -> _Reply:
        """Mark a connection of a process that may make more calls. It keeps the server alive."""
        session.stays = True
        return {"staying": True}

    def _on_learn(self, session: Session, message: _Message, _: list[int]) -> _Reply:
        """Have libraries imported before the first call; answer with the libraries still to be imported."""
        names = self._learning.installed(message["names"])
        self._note_imports(names, session.caller, message["kind"])
        return {"learning": sorted({name.partition(".")[0] for name in self._learning.wanted()})}

    def _on_status(self, session: Session, _: _Message, __: list[int]) -> _Reply:
        """Answer with the fields of :class:`~.control.Status` that this process knows."""
        others = [other for other in self._callers() if other is not session]
        return {
            "pid": os.getpid(),
            "version": __version__,
            "python": sys.executable,
            "uptime_s": time.time() - self._began,
            "calls": self._calls,
            "workers": [other.label for other in others if other.pid >= 0],
            "users": sum(other.stays for other in others),
            "libraries": self._learning.libraries(),
            "refused": sorted(self._learning.refused),
            "preload": [name for name, _ in self._start.preload],
        }

    def _on_stop(self, session: Session, message: _Message, __: list[int]) -> _Reply:
        """Drain, unless the message spares servers with callers. Answer whether this server stops."""
        for other in list(self._sessions.values()):
            if other is not session and messages.is_closed(other.connection):
                # Its process has just exited, and the loop has not noticed yet.
                self._forget(other)
        stopping = len(self._callers()) == 1 or not message.get("if_unused")
        if stopping:
            self._drain()
        return {"stopping": stopping, "pid": os.getpid()}

    def _on_preload(self, session: Session, message: _Message, descriptors: list[int]) -> _Reply:
        """Fork a server that calls the user's preload functions and keeps their data."""
        folder, ready, lock, settings = descriptors
        start = Start(**message["start"])

        def begin() -> None:
            sockets.name_starter(lock)
            Inherited(**messages.read_memory_file(settings)).apply(folder)
            os.close(folder)
            self._start, self._began, self._calls = start, time.time(), 0
            try:
                with self._use.noted():
                    libraries.preload_on_cpu(start.preload)
            except BaseException as error:
                traceback.print_exc()
                os.write(ready, describe(error, is_of_user=True))
                return
            self._files.note(identity.server_path())
            self.open(None)
            self.run(ready, lock)

        pid = self._derive({folder, ready, lock, settings}, begin)
        self._orphans.add(pid)
        return {"pid": pid}

    # Workers

    def _work(self, session: Session, ends: child.Ends) -> None:
        """Run as a worker. Called in the fork."""
        # Orphans among this process's descendants become its children, so they can be found and ended.
        adopt_orphans()
        self._leave_parent({session.folder, session.settings_file, *ends.all()})
        settings = self._take_over(session)
        frameworks.seed_fork()
        sys.argv[:] = ["-c", f"flower-gpu: {session.label}"]
        origin = child.Origin(
            settings["env"],
            set_too_late=self._use.set_too_late,
            imported=partial(self._learning.imported, self._modules),
        )
        facts.imported_by_forks = {}
        child.forked(ends, origin)
        child.leave()

    def _be_program(self, session: Session, message: _Message, life: int, *streams: int) -> NoReturn:
        """Run as a program. Called in the fork."""
        self._take_over(session)
        die_with_the_caller(life)
        # Orphans among this process's descendants become its children, so they can be found and ended.
        adopt_orphans()
        interpreter.begin(message["argv"], streams, interpreter.with_all_cores(os.environ))
        interpreter.run_to_end(
            lambda: load_task(message["function"])(),
            lambda: self._report(self._learning.imported(self._modules), session.record["kind"]),
        )

    def _take_over(self, session: Session) -> dict[str, Any]:
        """Apply the caller's settings, and return the settings that only forks may know.

        Called in the fork.
        """
        settings: dict[str, Any] = messages.read_memory_file(session.settings_file)
        Inherited(**settings["inherited"]).apply(session.folder)
        os.close(session.folder)
        self._use.apply_changes(keep=settings["env"])
        ANSWERS.ask_cuda()
        return settings

    def _forget(self, session: Session) -> None:
        """Drop a connection that its caller has closed. The kernel kills the worker of a dead caller."""
        self._selector.unregister(session.connection)
        del self._sessions[session.connection.fileno()]
        if session.pid >= 0:
            self._orphans.add(session.pid)
            # The worker may already be a zombie, and then no further SIGCHLD arrives.
            self._on_signal()
        session.close()

    def _on_signal(self) -> None:
        """Reap exited orphans, and clean up after them."""
        self._loop.clear()
        ended = {pid for pid in self._orphans if os.waitpid(pid, os.WNOHANG)[0]}
        self._orphans -= ended
        # The callers of these workers have exited, so their socket folders may be left over.
        if ended:
            state_folder.remove_left_socket_folders()
        self._end_sessions()

    def _end_sessions(self) -> bool:
        """Kill processes that finished workers have put into other sessions. Return True if there were any.

        The callers end the process groups of their workers.
        """
        workers = {session.pid for session in self._sessions.values()} | self._orphans
        return self._loop.end_left(workers)

    def _leave_parent(self, keep: Set[int]) -> None:
        """Close everything that belongs to the server, except the descriptors in ``keep``.

        Called in a fork.
        """
        self._loop.leave()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Detach the sockets. Otherwise, their destructors would close the same descriptor numbers again,
        # which may belong to other files by then.
        descriptors = {self._listener.detach()}
        for session in self._sessions.values():
            descriptors |= {session.connection.detach(), *session.files()}
        if self._learning.running is not None:
            descriptors.add(self._learning.running.report)
            self._learning.running = None
        for descriptor in descriptors - keep - {-1}:
            os.close(descriptor)
        self._sessions.clear()
        self._orphans.clear()

    # Servers and programs that are forked from this server and have its libraries

    def _derive(self, keep: Set[int], begin: Callable[[], None]) -> int:
        """Fork a process that calls ``begin``, and return its process id.

        ``keep``: descriptors of the server that stay open in the fork.
        """
        release_openmp_threads()
        pid = os.fork()
        if pid == 0:
            become(partial(self._begin_derived, keep, begin))
        return pid

    def _begin_derived(self, keep: Set[int], begin: Callable[[], None]) -> NoReturn:
        try:
            self._leave_parent(keep)
            os.setsid()
            begin()
        except Become:
            raise
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    def _grow(self) -> None:
        """Fork a trial that imports the reported libraries, and takes over if they did no harm."""
        names = self._learning.wanted()
        if not names or self._learning.running is not None or self._draining:
            return
        report, write = os.pipe2(os.O_CLOEXEC)
        parent, listener = os.getpid(), self._listener.fileno()
        callers = {fd: session.caller for fd, session in self._sessions.items() if session.stays}

        def begin() -> None:
            # This process holds the listening socket, but does not answer yet.
            end_with_parent(parent)
            os.close(report)
            try:
                self._learning.learn(names)
            except libraries.UnfitLibraryError as error:
                print(f"not imported any more: {error}", file=sys.stderr, flush=True)
                os.write(write, json.dumps(error.libraries).encode())
                return
            for fd, caller in callers.items():
                self._sessions[fd] = Session(socket.socket(fileno=fd), caller, is_proven=True, stays=True)
            self.open(socket.socket(fileno=listener))
            end_with_parent(None)
            os.write(write, b"null")
            os.close(write)
            self.serve()

        try:
            pid = self._derive({listener, write, *callers}, begin)
        except OSError:
            # The system starts no more processes now. The next worker's report starts another trial.
            os.close(report)
            os.close(write)
            return
        os.close(write)
        self._orphans.add(pid)
        self._learning.running = Growth(pid, report, names, time.monotonic() + _TRIAL_S)
        self._selector.register(report, selectors.EVENT_READ, self._on_growth)

    def _note_imports(self, names: Sequence[str], caller: int, kind: str) -> None:
        """Have reported modules imported for later workers, by this server or its successor."""
        if self._has_successor:
            if names:
                self._report(names, kind)
            return
        if self._learning.running is not None:
            self._learning.running.note_later(names, kind)
        self._learning.note(names, caller, kind)
        self._grow()

    def _report(self, names: Sequence[str], kind: str) -> None:
        """Report imports to the server that listens under this name now, if any.

        Blocks for up to a second until the answer arrives. If the answer were left unread, closing the
        connection would reset it, and the report would be lost.
        """
        with suppress(messages.Gone, ConfigError), sockets.connect(self._start.name, _TICK_S) as connection:
            messages.send(connection, {"op": "learn", "names": names, "kind": kind})
            messages.receive(connection)

    def _end_growth(self) -> None:
        """Kill the running trial, if any."""
        growth = self._learning.running
        # A process in _orphans has not been reaped, so its pid cannot belong to another process.
        if growth is not None and growth.pid in self._orphans:
            os.kill(growth.pid, signal.SIGKILL)

    def _on_growth(self) -> None:
        """Hand over to the trial that has reported success, or refuse the libraries that did harm."""
        growth, self._learning.running = self._learning.running, None
        assert growth is not None
        self._selector.unregister(growth.report)
        refused = growth.refused()
        if refused is None:
            self._drain(has_successor=True)
            for kind, names in growth.reported.items():
                self._report([*names], kind)
        else:
            self._learning.refused |= refused
            self._grow()

    def _drain(self, *, has_successor: bool = False) -> None:
        """Accept no more calls, and end when the last running worker has exited.

        ``has_successor``: True if another process has the listening socket and the staying clients now.
        """
        if self._draining:
            return
        self._draining, self._has_successor = True, has_successor
        self._end_growth()
        self._selector.unregister(self._listener)
        self._listener.close()
        if not has_successor:
            sockets.remove(self._start.name, self._socket_file)
            return
        for session in [other for other in self._sessions.values() if other.stays]:
            self._forget(session)
