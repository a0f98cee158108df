"""The guard: a program that kills the processes of a killed launcher. It imports nothing of this package.

The kernel kills the launcher's services with the launcher (see ``supervisor.py``). It does not kill processes
that Flower has detached into their own sessions. A ``flwr-serverapp`` was seen to live on for minutes. All
processes of a run have the run's folder in their environment, so the guard finds them there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_SWEEPS_S = 5.0


def marked(marker: bytes) -> list[int]:
    """Return the pids of other processes that were started with an environment entry ``NAME=value``."""
    pids: list[int] = []
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - Path.iterdir costs ten times as much
    except OSError:  # not Linux
        return pids
    for name in names:
        if name.isdecimal() and int(name) != os.getpid():
            # The environment of another user's process cannot be read. A zombie has no environment.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if marker in file.read().split(b"\0"):
                    pids.append(int(name))
    return pids


def kill_marked(marker: bytes) -> None:
    """Kill all marked processes. Repeats until the list is empty, because a new fork may be missing in it."""
    deadline = time.monotonic() + _SWEEPS_S
    while (pids := marked(marker)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    """Wait for the end of standard input, which only the launcher holds open, and kill all processes."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    kill_marked(os.fsencode(sys.argv[1]))


if __name__ == "__main__":
    main()
