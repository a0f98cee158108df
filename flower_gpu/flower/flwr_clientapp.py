"""Our ``flwr-clientapp``, which a SuperNode starts for each message (see the drawing in commands.py).

It imports next to nothing. The host's fork server makes a child of it that has Flower and torch imported
already; this process waits for it, with the same arguments, environment, working directory, output, signals
and exit status. Where this process is a fork of one with Flower, and the app runs in a worker, it does
without that child.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Final

from flower_gpu import standard_streams
from flower_gpu.errors import FlowerGPUError, WorkerDiedError, WorkerStartError
from flower_gpu.workers import caller as worker
from flower_gpu.workers import methods, threads
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.threads import planned_threads

#: Tells the processes of a SuperNode whether each message gets a lease.
RULE_VARIABLE: Final = "FLOWER_GPU_SUPERNODE"
WITHOUT_LEASE: Final = "start"

_CLIENTAPP: Final = "flower_gpu.flower.clientapp"
#: What handles a message.
TASK: Final = f"{_CLIENTAPP}:main"
_NAME = "flwr-clientapp"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Handle one message; exits with the status of Flower's own command."""
    standard_streams.open_missing()
    arguments = sys.argv[1:]
    with_lease = takes_lease(os.environ)
    if not client.is_supported():
        _run_here(arguments, with_lease, "this platform has no fork server")
    if with_lease and _CLIENTAPP in sys.modules:
        # A fork of a process with Flower (programs/): it needs a worker only, and saves a fork of a process
        # with torch, and its end.
        try:
            sys.exit(sys.modules[_CLIENTAPP].main([_NAME, *arguments], with_lease, True))
        except FlowerGPUError as error:
            print(f"flower-gpu: {error}", file=sys.stderr)
            sys.exit(1)
    env = threads.environment(planned_threads(os.environ), {})  # an app without a worker trains there
    call = Call(TASK, ([_NAME, *arguments], with_lease, True), env=env, setup=threads.SETUP, label=_NAME)
    try:
        code = worker.run(call, methods.FORKSERVER, on_start=_forward)
    except WorkerStartError as error:
        _run_here(arguments, with_lease, str(error))
    except WorkerDiedError as error:
        if error.exitcode:  # else it had nothing to tell: so Flower leaves where nobody answers it
            print(f"flower-gpu: {error}", file=sys.stderr)
        code = error.exitcode
        if code < 0:
            _end_by(-code)
    except FlowerGPUError as error:
        print(f"flower-gpu: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def takes_lease(environ: Mapping[str, str]) -> bool:
    """Tell whether a message of this SuperNode gets a lease; an unknown word is the strict one."""
    return environ.get(RULE_VARIABLE) != WITHOUT_LEASE


def _forward(pid: int, _: str) -> None:
    """From now on, pass this process's signals on to the child."""

    def forward(number: int, __: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)


def _end_by(number: int) -> None:
    """End with the child's exit status or signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what there was to see died with the child
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _run_here(arguments: list[str], with_lease: bool, reason: str) -> None:
    """Do all of it in this process: slow to start, with the same lease."""
    print(f"flower-gpu: {_NAME} starts without the fork server, which is slower: {reason}", file=sys.stderr)
    from flower_gpu.flower import clientapp

    sys.exit(clientapp.main([_NAME, *arguments], with_lease, False))
