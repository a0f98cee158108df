"""Why no more processes can be started."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

from flower_gpu import control_group


def explained(error: OSError) -> str:
    """Return the text of an error of starting a process, with the numbers where a limit was reached."""
    if error.errno != errno.EAGAIN:
        return str(error)
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    figures = []
    if limit != resource.RLIM_INFINITY:
        figures.append(f"this account has {_count()} processes and threads and may have {limit} (ulimit -u)")
    if (of_group := control_group.process_count()) is not None:
        figures.append(f"the control group has {of_group[0]} and may have {of_group[1]} (pids.max)")
    reached = ", ".join(figures) or "the system has no more processes"
    return f"{error.strerror}; {reached}. Raise that limit, or let fewer workers run at a time"


def _count() -> int:
    """Count the processes and threads of this account that can be seen."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if path.stat().st_uid == os.getuid():
                count += sum(1 for _ in (path / "task").iterdir())
    return count
