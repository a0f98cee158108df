"""The program that becomes a fork server."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

from flower_gpu import frameworks
from flower_gpu.frameworks import cuda_answers
from flower_gpu.workers import socket_folder
from flower_gpu.workers.forkserver import learning, libraries, sockets
from flower_gpu.workers.forkserver.fitness import EnvironmentUse
from flower_gpu.workers.forkserver.identity import LIMITS, SHAPING_LIMITS
from flower_gpu.workers.forkserver.learning import Learning
from flower_gpu.workers.forkserver.messages import Start, describe
from flower_gpu.workers.forkserver.server import Server
from flower_gpu.workers.life import explained

#: Its text; ``path`` is what ``sys.path`` is set to.
PROGRAM = "import sys; sys.path[:] = {path!r}; from flower_gpu.workers.forkserver.program import main; main()"

# Threads of BLAS and OpenMP do not survive a fork; workers set their own numbers.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> NoReturn:
    """Become the fork server that the first argument (JSON) describes."""
    record = json.loads(sys.argv[1])
    ready, lock = record["ready"], record["lock"]
    try:
        if not record["detached"] and os.fork():
            os._exit(0)  # so that no caller has to reap it
    except OSError as error:
        os.write(ready, explained(error).encode())
        raise
    for descriptor in (ready, lock):
        os.set_inheritable(descriptor, False)
    _leave_limits_of_starter()
    try:
        _make(Start(**record["start"]), record).run(ready, lock)
    except BaseException as error:
        with suppress(OSError):  # it has been ready
            os.write(ready, describe(error))
        raise
    os._exit(0)


def _leave_limits_of_starter() -> None:
    """Undo what the process that started this one has set for itself; other callers' workers inherit it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in {*LIMITS} - {*SHAPING_LIMITS, resource.RLIMIT_CORE}:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, (hard, hard))


def _make(start: Start, record: dict[str, Any]) -> Server:
    learned = learning.LearnedFile(start.name)
    use = EnvironmentUse()
    cuda_answers.ask_nvml()
    try:
        with use.noted():
            libraries.import_always(start.without)
            learned.take()
            libraries.import_all(learned.names)
    except Exception as error:
        if not learned.names:  # it would end the next attempt as well
            raise
        print(f"starting again without what was learned: {error}", file=sys.stderr, flush=True)
        for descriptor in (record["ready"], record["lock"]):
            os.set_inheritable(descriptor, True)
        arguments = [*sys.orig_argv[:-1], json.dumps({**record, "detached": True})]
        os.execv(sys.executable, arguments)
    learned.write(learned.names)
    sockets.remove_old_files()
    socket_folder.remove_left()
    frameworks.use_one_thread()
    return Server(start, use, Learning(use, learned, start.without))
