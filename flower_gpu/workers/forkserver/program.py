"""The program that becomes the host's fork server, and the function by which a caller starts it.

The problem: a server must outlive its starter, but the starter has to learn when the server is ready, or why
it is not.

Steps: the caller holds the lock to start a server of this name, opens a pipe, and starts the program with
both (:func:`start`). The program forks once and its parent exits, so that no caller has to reap the server.
The server imports its libraries, opens its socket, writes ``READY`` to the pipe, and releases the lock.

Races and failures:

- The starter may be killed. The server inherits the lock, so no other caller starts a second server
  meanwhile. A server that hangs during its start is killed after a time limit (``killed_after``).
- A learned library may kill the server when it is imported. So the server removes the file that lists the
  learned libraries before it imports them, and the second try starts without them.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from flower_gpu import frameworks
from flower_gpu.errors import WorkerStartError
from flower_gpu.frameworks.cuda_answers import ANSWERS
from flower_gpu.workers import messages, state_folder
from flower_gpu.workers.forkserver import identity, sockets
from flower_gpu.workers.forkserver.fitness import EnvironmentUse
from flower_gpu.workers.forkserver.forking import READY, Become, Start, describe
from flower_gpu.workers.forkserver.identity import LIMITS, SHAPING_LIMITS
from flower_gpu.workers.forkserver.libraries import Learning, learned_file
from flower_gpu.workers.forkserver.server import Server
from flower_gpu.workers.forkserver.waiting import Wait
from flower_gpu.workers.interrupts import allowed_interrupts
from flower_gpu.workers.life import explained, killed_after
from flower_gpu.workers.threads import ONE_THREAD

_START_S = 300.0  # time limit of a start; imports on a busy machine take long
_POLL_S = 0.5
_MARGIN_S = 20.0  # time limit of everything but the imports

#: Longest time that a start takes, including a second try. A process that holds the start lock for longer has
#: been stopped, or cannot be killed.
LONGEST_START_S: Final = 2 * _START_S + _MARGIN_S


class _DiedError(WorkerStartError):
    """A server has ended during its start without giving a reason."""


def start(
    wanted: Mapping[str, Any], environ: Mapping[str, str], deadline: float | None, lock: int, wait: Wait
) -> None:
    """Start a fork server, and wait until it is ready.

    ``wanted``: fields of its :class:`~flower_gpu.workers.forkserver.forking.Start`.
    ``lock``: descriptor of the start lock, which the caller holds.

    Raises WorkerStartError if the server could not be started.
    Raises TimeoutError after ``deadline`` (of ``time.monotonic``).
    """
    learned = learned_file(wanted["name"])
    for is_last in (False, True):
        had_learned = learned.exists()
        try:
            with said_ready(deadline, _START_S, "the fork server", wait) as ready:
                group = _start(wanted, environ, ready, lock)
            return
        except WorkerStartError as error:
            # If the server hangs, it still holds the start lock.
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            # A second try helps in two cases. A learned library has ended the server: the next server starts
            # without the learned libraries. Or the server was killed, by a user or for lack of memory: the
            # next server may survive.
            if is_last or not (isinstance(error, _DiedError) or (had_learned and not learned.exists())):
                raise


def _start(wanted: Mapping[str, Any], variables: Mapping[str, str], ready: int, lock: int) -> int:
    """Start the program of a fork server, and return its process group. The server is not our child."""
    record = {"start": wanted, "ready": ready, "lock": lock, "limit_s": _START_S}
    environ = {name: value for name, value in variables.items() if not name.startswith("FLOWER_GPU_")}
    # FLOWER_GPU_STATE_DIR is the only variable of ours that a server needs. A run's variables would mark the
    # server as a part of that run. The path is made absolute, because the server has another working
    # directory.
    if os.environ.get("FLOWER_GPU_STATE_DIR"):
        environ["FLOWER_GPU_STATE_DIR"] = str(state_folder.state_parent())
    environ = {**frameworks.UNTOUCHED_CUDA, **environ}
    command = identity.fresh_interpreter(f"{__name__}:main", identity.server_path())
    with (
        open(sockets.open_log(wanted["name"]), "w") as log,
        subprocess.Popen(
            [*command, json.dumps(record)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environ, **ONE_THREAD},
            pass_fds=(ready, lock),
            start_new_session=True,
        ) as process,
    ):
        return process.pid


@contextmanager
def said_ready(deadline: float | None, limit_s: float | None, what: str, wait: Wait) -> Iterator[int]:
    """Yield a descriptor that the new server writes to, then wait until the server is ready.

    ``what``: name of the server in messages.

    Raises WorkerStartError if the server reports an error, or ends without a report.
    Raises TimeoutError if the server reports nothing until ``deadline``.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            yield write
        finally:
            os.close(write)
        began = time.monotonic()
        while not messages.can_be_read(read, 0):
            with allowed_interrupts():
                messages.can_be_read(read, _POLL_S)
            wait.say(f"{what} is not ready yet" + (f" (it may take {limit_s:g} s)" if limit_s else ""))
            now = time.monotonic()
            if deadline is not None and now > deadline:
                raise TimeoutError(f"{what} was not ready in time")
            if limit_s is not None and now - began > limit_s:
                raise WorkerStartError(f"{what} was not ready after {limit_s:g} s")
        report = os.read(read, 1 << 16)
        if not report:
            raise _DiedError(f"{what} could not be started: it ended; its log is in {sockets.folder()}")
        if report != READY:
            raise WorkerStartError(f"{what} could not be started: {report.decode(errors='replace')}")
    finally:
        os.close(read)


def main() -> NoReturn:
    """Become the fork server that the first argument (JSON) describes."""
    work: Callable[[], object] = _serve
    # A fork unwinds its stack to this loop, and then does its own work.
    while True:
        try:
            work()
            os._exit(0)
        except Become as fork:
            work = fork.work


def _serve() -> None:
    record = json.loads(sys.argv[1])
    ready, lock = record["ready"], record["lock"]
    try:
        if os.fork():
            os._exit(0)  # The parent exits, so that no caller has to reap the server.
    except OSError as error:
        os.write(ready, explained(error).encode())
        raise
    for descriptor in (ready, lock):
        os.set_inheritable(descriptor, False)
    try:
        # The starter would kill a server that hangs, but may have been killed itself.
        with killed_after(record["limit_s"]):
            sockets.name_starter(lock)
            _leave_limits_of_starter()
            wanted, use = Start(**record["start"]), EnvironmentUse()
            learning = Learning(wanted.name, use, wanted.without)
            ANSWERS.ask_nvml()
            learning.begin()
            sockets.remove_old_files()
            state_folder.remove_left_socket_folders()
            frameworks.use_one_thread()
            server = Server(wanted, use, learning)
            server.open(None)
        server.run(ready, lock)
    except Become:
        raise
    except BaseException as error:
        # The pipe is already closed if the server had reported that it is ready.
        with suppress(OSError):
            os.write(ready, describe(error))
        raise


def _leave_limits_of_starter() -> None:
    """Undo the starter's signal settings and soft limits. Other callers' workers would inherit them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python always ignores these.
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in {*LIMITS} - {*SHAPING_LIMITS, resource.RLIMIT_CORE}:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, (hard, hard))
