"""What runs in place of Flower's ``flwr-clientapp``: a small start that imports next to nothing.

A SuperNode starts a process for each message by that name. This one has the host's fork server make a child
that has Flower and torch imported already, and waits for it: same arguments, environment, working directory,
output, signals and exit status.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from flower_gpu.errors import WorkerDiedError, WorkerError, WorkerStartError
from flower_gpu.isolation import start, worker
from flower_gpu.isolation.call import Call

_TASK = "flower_gpu.flower.clientapp:main"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Handle one message; exits with the status of Flower's own command."""
    arguments = sys.argv[1:]
    if start.choose("auto") != "forkserver":
        _run_here(arguments, "there is no fork server on this platform")
    try:
        code = worker.run(Call(_TASK, (arguments,), label="flwr-clientapp"), "forkserver", on_start=_forward)
    except WorkerStartError as error:
        _run_here(arguments, str(error))
    except WorkerDiedError as error:
        print(f"flower-gpu: {error}", file=sys.stderr)
        code = error.exitcode if error.exitcode > 0 else 128 - error.exitcode
    except WorkerError as error:
        print(f"flower-gpu: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _forward(pid: int, _: str) -> None:
    """From now on, send the child what this process is sent."""

    def forward(number: int, __: FrameType | None) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)


def _run_here(arguments: list[str], reason: str) -> None:
    """Do all of it in this process: slow to start, with the same lease."""
    print(f"flower-gpu: flwr-clientapp starts without a fork server, which is slower: {reason}", file=sys.stderr)
    from flower_gpu.flower import clientapp

    sys.exit(clientapp.main(arguments))
