"""One running zygote, on its caller's side: started, spoken to, ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.errors import WorkerStartError
from flower_gpu.isolation import socket_folder
from flower_gpu.isolation import worker as one_call
from flower_gpu.isolation.call import Call
from flower_gpu.isolation.forkserver import sockets
from flower_gpu.isolation.zygote import wire

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_PROGRAM = "flower_gpu.isolation.zygote.program:serve"
_START_S = 300.0  # imports on a busy machine take their time
_POLL_S = 0.05
_END_S = 10.0
_STOPPED_S = 20.0  # by a signal, while somebody waits for it
_GAP_S = 5.0  # between two looks: what was before is not known any more

_log = logging.getLogger("flwr.flower_gpu")


@dataclass(frozen=True)
class ZygoteSettings:
    """What a zygote is started with.

    Parameters
    ----------
    name : str
        What its calls are of.
    start_method : str
        ``"forkserver"`` or ``"spawn"``.
    env : mapping of str to str
        Environment variables that all its workers have.
    setup : str, optional
        As of a :class:`~flower_gpu.isolation.call.Call`.
    modules : sequence of str
        Libraries that it imports before the first fork.
    rehearsal : str, optional
        As for :func:`flower_gpu.isolation.zygote.program.serve`.
    seeds : bool
        As there.
    without : frozenset of str
        Top-level names of libraries that its workers have no use for, which makes forks of it cheaper.
    preload : sequence
        As of a call.
    """

    name: str
    start_method: str = "forkserver"
    env: Mapping[str, str] = field(default_factory=dict)
    setup: str | None = None
    modules: Sequence[str] = ()
    rehearsal: str | None = None
    seeds: bool = True
    without: frozenset[str] = frozenset()
    preload: Sequence[tuple[str, Mapping[str, Any]]] = ()


class UnfitError(Exception):
    """A zygote could not import libraries and stay what can be forked."""

    def __init__(self, libraries: set[str]) -> None:
        super().__init__(", ".join(sorted(libraries)))
        self.libraries = libraries


class Process:
    """One running zygote.

    Parameters
    ----------
    settings : ZygoteSettings
        What it is started with.

    Raises
    ------
    WorkerStartError
        If it cannot be started.
    """

    def __init__(self, settings: ZygoteSettings) -> None:
        self.pid = -1
        self._lock = threading.Lock()
        self._seen: tuple[str, str] | None = None
        self._seen_at = self._still_since = 0.0
        self._failed: list[BaseException] = []
        # Not a socket with an address: whoever can connect to that could be taken for the zygote.
        ours, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # For what a spawned one preloads, before its program has PyTorch ask NVML only.
        meanwhile = {_NVML_CHECK: "1"} if _NVML_CHECK not in {**os.environ, **settings.env} else {}
        call = Call(
            _PROGRAM,
            (settings.name,),
            {
                "modules": list(settings.modules),
                "rehearsal": settings.rehearsal,
                "seeds": settings.seeds,
                "meanwhile": list(meanwhile),
            },
            env={**settings.env, **meanwhile},
            setup=settings.setup,
            label=f"workers of {settings.name}",
            preload=settings.preload,
            held=zygotes.fileno(),
            without=settings.without,
        )
        with ours, zygotes:
            self._thread = threading.Thread(
                target=_run, args=(call, settings.start_method, self._failed), daemon=True
            )
            self._thread.start()
            self.connection = self._accepted(ours)
        try:
            self.connection.settimeout(_START_S)
            said, _ = wire.receive(self.connection)
        except sockets.Gone as error:
            self.close()
            raise self._error(str(error)) from error
        if "unfit" in said:
            self.close()
            raise UnfitError(set(said["unfit"]))
        self.pid = said["ready"]

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.connection.fileno() < 0 or sockets.is_closed(self.connection)

    def hangs(self, worker: int) -> bool:
        """Tell whether it has stood still for too long; to be asked again and again by who waits for it.

        One that imports uses the CPU, and on a host with too much to do it is at least ready to run: neither
        hangs. One that sleeps may wait for a worker: that has to last longer than where it is stopped.

        Parameters
        ----------
        worker : int
            Who does the call, or is about to; -1 for nobody.
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
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._thread.join(_END_S)

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
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._thread.join(_END_S)
        socket_folder.remove_left()  # its workers', where it was killed

    def _accepted(self, ours: socket.socket) -> socket.socket:
        """Wait for the connection that the zygote makes: only the two of them have its ends."""
        ours.settimeout(_POLL_S)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with suppress(sockets.Gone):
                return socket.socket(fileno=wire.receive(ours)[1][0])
            if not self._thread.is_alive():
                raise self._error("it ended at once")
        raise WorkerStartError(f"no zygote after {_START_S:g} s")

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            wire.send(self.connection, message, descriptors)

    def _error(self, text: str) -> BaseException:
        self._thread.join(_END_S)
        return self._failed[0] if self._failed else WorkerStartError(f"the zygote has ended: {text}")


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


def _run(call: Call, start_method: str, failed: list[BaseException]) -> None:
    try:
        one_call.run(call, start_method, or_spawn=True)
    except BaseException as error:
        failed.append(error)
