"""Whether a process that a trace names is still there."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

#: Clocks may have been set meanwhile; a number is not given out again this soon.
_SLACK_S: Final = 10.0


def is_there(pid: int, since: float) -> bool:
    """Tell whether a process of this host lives, and is not a later one with the same number.

    Parameters
    ----------
    pid : int
        Its number.
    since : float
        When it was there; Unix seconds.
    """
    if pid <= 0:
        return False
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return not _has_proc() and _answers(pid)
    except OSError:
        return _answers(pid)
    # Its name is in parentheses, and may have any in it.
    state, *fields = text.rpartition(")")[2].split()
    if state in "ZX":
        return False
    return _booted_at() + int(fields[18]) / os.sysconf("SC_CLK_TCK") <= since + _SLACK_S


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


@cache
def _has_proc() -> bool:
    return Path("/proc/self/stat").exists()


@cache
def _booted_at() -> float:
    """Return when the host was started; Unix seconds. 0 where that is not told: no process is later then."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "btime" and value.strip().isdecimal():
            return float(value)
    return 0.0
