"""Our ``flwr-clientapp``, which a SuperNode starts for each message (see the drawing in commands.py).

A fresh process would have to import Flower and torch for each message, which is slow. So this program imports
hardly any modules. It requests a child from the host's fork server, which has both imported already. The
child gets the same arguments, environment, working directory and output. This process waits for it, forwards
signals to it, and exits with its exit status or by its signal.

There are two exceptions:

- If this process is itself a fork of a process that has imported Flower (``programs/``), and the message gets
  a lease, the app runs in a worker anyway. Then this process handles the message without a child.
- If the fork server cannot be used, this process does all the work itself, which is slower. It says so.

The child may be killed, for example by the kernel when memory runs out. Then this process ends by the same
signal, so that Flower sees the same end as without the child. It writes no core file of its own, because only
the child's memory is of interest.
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

#: Environment variable that says whether each message of a SuperNode gets a lease.
RULE_VARIABLE: Final = "FLOWER_GPU_SUPERNODE"
WITHOUT_LEASE: Final = "start"

_CLIENTAPP: Final = "flower_gpu.programs.clientapp"
#: The function that handles a message.
TASK: Final = f"{_CLIENTAPP}:main"
_NAME = "flwr-clientapp"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Handle a message, and exit with the status of Flower's own command."""
    standard_streams.open_missing()
    arguments = sys.argv[1:]
    with_lease = takes_lease(os.environ)
    if not client.is_supported():
        _run_here(arguments, with_lease, "this platform has no fork server")
    if with_lease and _CLIENTAPP in sys.modules:
        # This process is a fork of a process that has imported Flower (programs/). It needs only a worker, so
        # it saves the time to fork and end a process with torch.
        try:
            sys.exit(sys.modules[_CLIENTAPP].main([_NAME, *arguments], with_lease, True))
        except FlowerGPUError as error:
            print(f"flower-gpu: {error}", file=sys.stderr)
            sys.exit(1)
    # Without a worker the app trains in the child, so the child gets the planned number of threads.
    env = threads.environment(planned_threads(os.environ), {})
    call = Call(TASK, ([_NAME, *arguments], with_lease, True), env=env, setup=threads.SETUP, label=_NAME)
    try:
        code = worker.run(call, methods.FORKSERVER, on_start=_forward)
    except WorkerStartError as error:
        _run_here(arguments, with_lease, str(error))
    except WorkerDiedError as error:
        # Flower ends an app with status 0 if its SuperNode no longer answers. That is not an error.
        if error.exitcode:
            print(f"flower-gpu: {error}", file=sys.stderr)
        code = error.exitcode
        if code < 0:
            _end_by(-code)
    except FlowerGPUError as error:
        print(f"flower-gpu: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def takes_lease(environ: Mapping[str, str]) -> bool:
    """Return True if a message of this SuperNode gets a lease. An unknown value counts as the strict rule."""
    return environ.get(RULE_VARIABLE) != WITHOUT_LEASE


def _forward(pid: int, _: str) -> None:
    """Forward this process's signals to the child."""

    def forward(number: int, __: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)


def _end_by(number: int) -> None:
    """End this process by the signal that ended the child."""
    # No core file of this process: only the memory of the child would be of interest.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _run_here(arguments: list[str], with_lease: bool, reason: str) -> None:
    """Handle the message in this process. It starts slowly, but gets the same lease."""
    print(f"flower-gpu: {_NAME} starts without the fork server, which is slower: {reason}", file=sys.stderr)
    from flower_gpu.programs import clientapp

    sys.exit(clientapp.main([_NAME, *arguments], with_lease, False))
