"""Ends the processes of a killed launcher. Run as a program, it imports nothing of this package.

The kernel kills the launcher's services with it (see ``supervisor.py``), but not what Flower has detached
from them into sessions of their own: its ``flwr-serverapp`` was seen to live on for minutes. Everything that
belongs to a run carries the run's folder in its environment, and is found by that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_SWEEPS_S = 5.0


def marked(marker: bytes) -> list[int]:
    """Find the processes that were started with an environment entry ``NAME=value``, except this one."""
    found: list[int] = []
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - Path.iterdir costs ten times as much
    except OSError:  # not Linux
        return found
    for name in names:
        if name.isdecimal() and int(name) != os.getpid():
            # Processes of other users cannot be read; one that has ended has no environment any more.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if marker in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def kill_marked(marker: bytes) -> None:
    """Kill them again and again until none is left: one that was just forked is not in the list yet."""
    deadline = time.monotonic() + _SWEEPS_S
    while (pids := marked(marker)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    """Wait until standard input ends, which only the launcher holds open, then sweep."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    kill_marked(os.fsencode(sys.argv[1]))


if __name__ == "__main__":
    main()
