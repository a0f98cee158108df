"""A member's side of the benchmark: answer the driver, measure itself. Imports as little as it can."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any

MB = 1_000_000

#: Set while everything is tiny. One fork server serves all parts then.
QUICK = "BENCHMARKS_QUICK"
#: What a client's module imports, and each new process pays for. If all is tiny, it is a small one.
LIBRARY = "wave" if QUICK in os.environ else "torch"


def serve(prepare: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer requests of the driver, one line of JSON each, until it has no more.

    Parameters
    ----------
    prepare : callable
        Called once; returns what turns a request into the answer.
    """
    # The lines are for this process alone; what its children print goes to stderr.
    requests = os.fdopen(os.dup(0), "r")
    replies = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    answer = prepare()
    print(json.dumps({}), file=replies, flush=True)
    for line in requests:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


def wait_until_gone(pid: int) -> None:
    """Wait for the process of a call: only then is its memory back."""
    if pid == os.getpid():
        return
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll()
    finally:
        os.close(process)


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:  # man 5 proc: 5 resets VmHWM
        file.write("5")


def peak_mb() -> float:
    """Return the highest RSS of this process since the last :func:`reset_peak`."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MB
    raise RuntimeError("/proc/self/status has no VmHWM")
