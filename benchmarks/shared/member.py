"""A member is a process that answers requests of the benchmark. This module imports as little as possible."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any

MB = 1_000_000

#: Environment variable, set under ``--quick``. Then one fork server serves all parts.
QUICK = "BENCHMARKS_QUICK"
#: The library that a client's module imports. Under ``--quick`` it is a small one.
LIBRARY = "wave" if QUICK in os.environ else "torch"

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: Callable[[], Answer]) -> None:
    """Answer requests, one line of JSON each, until standard input is closed.

    ``prepare`` is called once and returns the function that answers a request.
    """
    # Replies go through a duplicate of stdout, and stdout itself becomes stderr. So output of child
    # processes never appears among the replies.
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
    """Wait until the process of a call has exited, because only then is its memory free again."""
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


def peak_mb(pid: int) -> float:
    """Return the highest RSS of a process."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MB
    return 0.0
