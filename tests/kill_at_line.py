"""Kills a process at a line of some code, so tests can check the state that it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

import flower_gpu.leases
from flower_gpu import files

#: The files of the ledger, which contain acquire, wait and release.
LEDGER_CODE = (
    files.__file__,
    *(f"{flower_gpu.leases.__path__[0]}/{name}.py" for name in ("ledger", "tickets", "ledger_folder")),
)


def kill_at_line(left: int, code: tuple[str, ...] = LEDGER_CODE) -> None:
    """Kill this process after `left` more lines in the files `code`."""

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in code:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.settrace(count)
