"""A started worker, as its caller sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Process(Protocol):
    """A started worker, leader of its own process group."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def has_exited(self) -> bool:
        """Whether it is gone; its pid is still its own."""
        ...

    def reap(self) -> int | None:
        """Give its pid back, once it has exited, and return the exit status (``-n`` for signal ``n``).

        None where somebody else took the status: the program ignores SIGCHLD, or waits for every child.
        """
        ...


class OwnChild:
    """A worker that this process started itself."""

    def __init__(self, pid: int, reap: Callable[[], object]) -> None:
        self.pid = pid
        self._reap = reap
        self._exited = False
        self._exitcode: int | None = None

    def has_exited(self) -> bool:
        """Whether it is gone; its pid is still its own."""
        if self._exited:
            return True
        try:
            if hasattr(os, "waitid"):
                # WNOWAIT: its pid, and so its group's id, stays taken until it is reaped.
                found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None:
                    self._exited = True
                    by_itself = found.si_code == os.CLD_EXITED
                    self._exitcode = found.si_status if by_itself else -found.si_status
            else:  # macOS before Python 3.13
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid != 0:
                    self._exited = True
                    self._exitcode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # SIGCHLD is ignored here, or somebody else waits for all children
            self._exited = True
        return self._exited

    def reap(self) -> int | None:
        """Give its pid back and return the exit status, where it is known."""
        with suppress(ChildProcessError):
            self._reap()
        return self._exitcode
