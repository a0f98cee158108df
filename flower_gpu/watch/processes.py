"""Whether a process that a trace names is still there."""

from __future__ import annotations

from typing import Final

#: Clocks may have been set meanwhile; a process number is not given out again this soon.
_SLACK_S: Final = 10.0


def is_there(pid: int, since: float) -> bool:
    """Tell whether the process that had this number at this time (Unix seconds) lives on this host."""
    import psutil  # here: most commands do without

    try:
        process = psutil.Process(pid)
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return pid > 0 and not has_ended and process.create_time() <= since + _SLACK_S
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
