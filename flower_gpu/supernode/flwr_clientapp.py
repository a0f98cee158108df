"""What runs in place of Flower's ``flwr-clientapp``: a small start that imports next to nothing.

A SuperNode starts a process for each message by that name. This one has the host's fork server make a child
that has Flower and torch imported already, and waits for it: same arguments, environment, working directory,
output, signals and exit status.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from types import FrameType

from flower_gpu.config import planned_threads
from flower_gpu.errors import FlowerGPUError, WorkerDiedError, WorkerStartError
from flower_gpu.isolation import threads, worker
from flower_gpu.isolation.call import Call
from flower_gpu.isolation.forkserver import client
from flower_gpu.supernode.rule import Rule

_TASK = "flower_gpu.flower.clientapp:main"
_NAME = "flwr-clientapp"
_OWN_ENVIRONMENT = "--allow-runtime-dependency-installation"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Handle one message; exits with the status of Flower's own command."""
    arguments = sys.argv[1:]
    rule = Rule.from_environment(os.environ)
    if _OWN_ENVIRONMENT in arguments:
        _run_here(arguments, rule, "the app's environment is built at run time")
    if not client.is_supported():
        _run_here(arguments, rule, "this platform has no fork server")
    env = threads.environment(planned_threads(os.environ), {})  # an app without a worker trains there
    call = Call(
        _TASK, ([_NAME, *arguments], rule.with_lease, True), env=env, setup=threads.SETUP, label=_NAME
    )
    try:
        code = worker.run(call, "forkserver", on_start=_forward)
    except WorkerStartError as error:
        _run_here(arguments, rule, str(error))
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


def _forward(pid: int, _: str) -> None:
    """From now on, send the child what this process is sent."""

    def forward(number: int, __: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)


def _end_by(number: int) -> None:
    """End as the child did, so that whoever started this process is told the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what there was to see died with the child
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _run_here(arguments: list[str], rule: Rule, reason: str) -> None:
    """Do all of it in this process: slow to start, with the same lease."""
    print(f"flower-gpu: {_NAME} starts without the fork server, which is slower: {reason}", file=sys.stderr)
    from flower_gpu.flower import clientapp

    sys.exit(clientapp.main([_NAME, *arguments], rule.with_lease, False))
