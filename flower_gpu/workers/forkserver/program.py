"""The program that becomes the host's fork server, and how a caller starts it."""

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

_START_S = 300.0  # imports on a busy machine take their time
_POLL_S = 0.5
_MARGIN_S = 20.0  # for all but the imports

#: Seconds that a start takes at most, with the second try. A process that holds the right to start a server
#: for longer has been stopped, or cannot be killed.
LONGEST_START_S: Final = 2 * _START_S + _MARGIN_S


class _DiedError(WorkerStartError):
    """A server has ended during its start, without a reason."""


def start(
    wanted: Mapping[str, Any], environ: Mapping[str, str], deadline: float | None, lock: int, wait: Wait
) -> None:
    """Start a fork server, and wait until it is ready; ``lock`` is the right to do so.

    ``wanted``: what becomes its :class:`~flower_gpu.workers.forkserver.forking.Start`.

    Raises WorkerStartError if it could not be started.
    """
    learned = learned_file(wanted["name"])
    for is_last in (False, True):
        had_learned = learned.exists()
        try:
            with said_ready(deadline, _START_S, "the fork server", wait) as ready:
                group = _start(wanted, environ, ready, lock)
            return
        except WorkerStartError as error:
            with suppress(ProcessLookupError):  # it hangs, and holds the right to start one
                os.killpg(group, signal.SIGKILL)
            # What an earlier server had learned may have ended it; the next one comes up without. Else
            # it was killed, for want of memory or by somebody: once more, as the next one may live.
            if is_last or not (isinstance(error, _DiedError) or (had_learned and not learned.exists())):
                raise


def _start(wanted: Mapping[str, Any], variables: Mapping[str, str], ready: int, lock: int) -> int:
    """Start the program of a fork server, which becomes nobody's child; returns its process group."""
    record = {"start": wanted, "ready": ready, "lock": lock, "limit_s": _START_S}
    environ = {name: value for name, value in variables.items() if not name.startswith("FLOWER_GPU_")}
    # What of ours a server needs; a run's own variables would mark it as a part of that run.
    if os.environ.get("FLOWER_GPU_STATE_DIR"):  # a relative one would be another in the server's folder
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
    """Yield a descriptor for the new server to write to, then wait until it has said that it is ready.

    ``what``: what is being started, for messages.

    Raises WorkerStartError if it says something else, or nothing at all.
    Raises TimeoutError if it says nothing until ``deadline``.
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
        said = os.read(read, 1 << 16)
        if not said:
            raise _DiedError(f"{what} could not be started: it ended; its log is in {sockets.folder()}")
        if said != READY:
            raise WorkerStartError(f"{what} could not be started: {said.decode(errors='replace')}")
    finally:
        os.close(read)


def main() -> NoReturn:
    """Become the fork server that the first argument (JSON) describes."""
    work: Callable[[], object] = _serve
    while True:  # a fork goes on from here
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
            os._exit(0)  # so that no caller has to reap it
    except OSError as error:
        os.write(ready, explained(error).encode())
        raise
    for descriptor in (ready, lock):
        os.set_inheritable(descriptor, False)
    try:
        with killed_after(record["limit_s"]):  # the starter, which would kill it, may have been killed itself
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
        with suppress(OSError):  # it has been ready
            os.write(ready, describe(error))
        raise


def _leave_limits_of_starter() -> None:
    """Undo the starter's settings of its own process: workers of other callers would inherit them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in {*LIMITS} - {*SHAPING_LIMITS, resource.RLIMIT_CORE}:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, (hard, hard))
