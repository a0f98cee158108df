"""A run's own fork server, on its caller's side: started, spoken to, replaced, ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from flower_gpu import frameworks
from flower_gpu.errors import FlowerGPUError, WorkerDiedError, WorkerStartError
from flower_gpu.printable import told_if_slow
from flower_gpu.workers import caller as one_call
from flower_gpu.workers import socket_folder
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client, sockets
from flower_gpu.workers.methods import FORKSERVER, StartMethod

_PROGRAM = "flower_gpu.workers.forkserver.run_program:serve"
_START_S = 300.0  # imports on a busy machine take their time
_POLL_S = 0.05
_END_S = 10.0
_STOPPED_S = 20.0  # by a signal, while somebody waits for it
_GAP_S = 5.0  # between two looks: what was before is not known any more

_log = logging.getLogger("flwr.flower_gpu")


@dataclass(frozen=True)
class RunServerSettings:
    """What a run's fork server is started with."""

    name: str  # what its calls are of
    method: StartMethod = FORKSERVER  # how it is started itself
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables that all its workers have
    setup: str | None = None  # as of a :class:`~flower_gpu.workers.call.Call`
    modules: Sequence[str] = ()  # libraries that it imports before the first fork
    # Top-level names of libraries that its workers have no use for, which makes forks of it cheaper
    without: frozenset[str] = frozenset()
    preload: Sequence[tuple[str, Mapping[str, Any]]] = ()  # as of a call


class ServerProcess:
    """One running server.

    Raises WorkerStartError if it cannot be started.
    """

    def __init__(self, settings: RunServerSettings) -> None:
        self.pid = -1
        self._lock = threading.Lock()
        self._seen: tuple[str, str] | None = None
        self._seen_at = self._still_since = 0.0
        self._failed: list[BaseException] = []
        # Not a socket with an address: another process could connect and pass for the fork server.
        ours, servers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # For what a spawned one preloads, before its program has PyTorch ask NVML only.
        own = {**os.environ, **settings.env}
        meanwhile = {name: value for name, value in frameworks.UNTOUCHED_CUDA.items() if name not in own}
        call = Call(
            _PROGRAM,
            (settings.name,),
            {
                "modules": list(settings.modules),
                "meanwhile": list(meanwhile),
            },
            env={**settings.env, **meanwhile},
            setup=settings.setup,
            label=f"workers of {settings.name}",
            preload=settings.preload,
            held=servers.fileno(),
            without=settings.without,
        )
        with ours, servers:
            self._thread = threading.Thread(
                target=_run, args=(call, settings.method, self._failed), daemon=True
            )
            self._thread.start()
            self.connection = self._accepted(ours)
        try:
            self.connection.settimeout(_START_S)
            said, _ = sockets.receive(self.connection)
        except sockets.Gone as error:
            self.close()
            raise self._error(str(error)) from error
        #: Libraries that it could not import and stay what can be forked: then it has ended.
        self.unfit = set(said.get("unfit", ()))
        if self.unfit:
            self.close()
        else:
            self.pid = said["ready"]

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.connection.fileno() < 0 or sockets.is_closed(self.connection)

    def hangs(self, worker: int) -> bool:
        """Tell whether it has stood still for too long; a caller that waits asks again and again.

        One that imports uses the CPU, and on a host with too much to do it is at least ready to run: neither
        hangs. One that sleeps may wait for a worker: that has to last longer than where it is stopped.
        """
        now = time.monotonic()
        seen = process_state(self.pid)
        with self._lock:
            if seen is None or seen != self._seen or now > self._seen_at + _GAP_S:
                self._still_since = now
            self._seen, self._seen_at = seen, now
            still_s = now - self._still_since
        state = seen[0] if seen is not None else ""
        if state in ("T", "t"):  # stopped by a signal, or traced
            return still_s > _STOPPED_S
        lives = process_state(worker)
        return state == "S" and (lives is None or lives[0] in "ZX") and still_s > _START_S

    def kill(self) -> None:
        """End it at once, with its workers: it does nothing any more."""
        if self.pid >= 0 and self._thread.is_alive():  # not reaped: the pid is its own
            _log.warning(
                "what forks workers (pid %d) has stood still for %.0f s, stopped by a signal or hanging: it "
                "is ended, and another one is started",
                *(self.pid, time.monotonic() - self._still_since),
            )
            self._kill()

    def open_line(self, descriptors: Sequence[int]) -> None:
        """Give it the workers' ends of a line."""
        self._send({"line": True}, descriptors)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker, and with SIGKILL to all of its group; nothing happens if it is gone."""
        with suppress(sockets.Gone):
            self._send({"pid": pid, "signal": int(number)})

    def drain(self) -> None:
        """Let it end when its last line is closed."""
        with suppress(sockets.Gone):
            self._send({"drain": True})

    def close(self) -> None:
        """End it and all its workers."""
        close_socket(self.connection)
        self._thread.join(_END_S)
        if self._thread.is_alive() and self.pid >= 0:  # stopped, or it waits for memory
            self._kill()
        socket_folder.remove_left()  # its workers', where it was killed

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._thread.join(_END_S)

    def _accepted(self, ours: socket.socket) -> socket.socket:
        """Wait for the connection that the run's fork server makes: only the two of them have its ends."""
        ours.settimeout(_POLL_S)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with suppress(sockets.Gone):
                return socket.socket(fileno=sockets.receive(ours)[1][0])
            if not self._thread.is_alive():
                raise self._error("it ended at once")
        raise WorkerStartError(f"no fork server after {_START_S:g} s")

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            sockets.send(self.connection, message, descriptors)

    def _error(self, text: str) -> BaseException:
        self._thread.join(_END_S)
        return (
            self._failed[0] if self._failed else WorkerStartError(f"the run's fork server has ended: {text}")
        )


def process_state(pid: int) -> tuple[str, str] | None:
    """Return the state of a process (proc(5)), and how long it has used a CPU; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], f"{fields[11]} {fields[12]}"


def close_socket(connection: socket.socket) -> None:
    """Close a socket for the other end to see, even where a fork of this process has it, too."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _run(call: Call, method: StartMethod, failed: list[BaseException]) -> None:
    try:
        one_call.run(call, method, or_spawn=True)
    except BaseException as error:
        failed.append(error)


_MAX_RENEWALS = 5
_WORKERS_THAT_LACK = 6  # before there is another process: to start it takes seconds of a core


class RunServer:
    """The fork server of one run: when workers report new imports, a successor with those replaces it."""

    def __init__(self, settings: RunServerSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._current: ServerProcess | None = None
        self._earlier: list[ServerProcess] = []
        self._is_closed = False
        self._known = set(settings.modules)
        self._unfit: set[str] = set()
        self._lacking = 0  # workers that had to import what the process had not
        self._renewals = 0
        self._renewing: threading.Thread | None = None

    def process(self) -> ServerProcess:
        """Return the process that forks new workers; start it where there is none.

        Raises WorkerStartError if it cannot be started.
        """
        with self._lock:
            if self._is_closed:
                raise WorkerStartError("this caller wants no more workers")
            if self._current is not None and self._current.has_ended():
                self._current.close()
                self._current = None
            if self._current is None:
                with told_if_slow(_log.info, "starting the workers' fork server, with the app's libraries"):
                    self._current = self._start()
            return self._current

    def imported(self, names: Sequence[str], *, at_once: bool = False) -> None:
        """Take note of libraries that a worker had to import: after a few, a new process has them.

        ``at_once``: not after a few: the worker was ended by its time limit, and the next ones will be as
        well.
        """
        with self._lock:
            new = [name for name in names if name not in self._known]
            self._lacking += bool(new)
            if (
                (self._lacking < _WORKERS_THAT_LACK and not at_once)
                or not new
                or self._is_closed
                or self._renewals >= _MAX_RENEWALS
                or (self._renewing is not None and self._renewing.is_alive())
            ):
                return
            self._known.update(new)
            self._lacking = 0
            self._renewals += 1
            self._renewing = threading.Thread(target=self._renew, args=(new,), daemon=True)
            self._renewing.start()

    def close(self) -> None:
        """End it and all its workers."""
        with self._lock:
            self._is_closed = True
            processes = [*self._earlier, *([self._current] if self._current is not None else [])]
        for process in processes:
            process.close()

    def _renew(self, names: list[str]) -> None:
        settings = replace(self._settings, modules=(*self._settings.modules, *names))
        try:
            if settings.method.from_server:
                client.learn(names, settings.without)  # it tries whether they survive a fork
            new = self._started(settings)
        except (FlowerGPUError, OSError):  # one of them ends a process: the one that is there goes on without
            return
        with self._lock:
            self._settings = settings
            old, self._current = self._current, new
            if old is not None:
                self._earlier.append(old)
        if old is not None:
            old.drain()
        if self._is_closed:
            new.close()

    def _start(self) -> ServerProcess:
        try:
            return self._started(self._settings)
        except WorkerDiedError:
            if not self._settings.modules:
                raise
        self._settings = replace(self._settings, modules=())
        return self._started(self._settings)

    def _started(self, settings: RunServerSettings) -> ServerProcess:
        while True:
            modules = [name for name in settings.modules if name.partition(".")[0] not in self._unfit]
            process = ServerProcess(replace(settings, modules=modules))
            if not process.unfit:
                return process
            if process.unfit <= self._unfit:
                names = ", ".join(sorted(process.unfit))
                raise WorkerStartError(f"the run's fork server cannot do without {names}")
            self._unfit |= process.unfit
