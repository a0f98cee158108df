"""Processes that SIGKILL does not end.

The kernel delivers SIGKILL when a thread returns from the kernel. A thread in uninterruptible sleep (state D)
does not return until the event that it waits for: an answer of a GPU that fell off the bus, of a network disk
whose server is gone, of a FUSE file system. That may take minutes, or for ever.

So no wait for a killed process may be without a limit. After :data:`KILLED_S` the caller of a worker goes
on, and a thread of its own waits for the worker's end. The ticket of the worker's lease stays locked
meanwhile, by the worker and by that thread, so its memory is granted to no other claim.

``subprocess.run`` with a timeout waits for the end of the program that it has killed, also in Python 3.14. So
:func:`run` stands for it where a driver may hang.

A process is gone only when its last thread is: its first thread may be a zombie while another one sleeps.
Therefore :func:`sleeping_in` looks at all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

#: Seconds from SIGKILL until a process counts as one that cannot be killed. To free the memory of a large
#: process, or a CUDA context, takes a second or two.
KILLED_S: Final = 5.0

# States of proc(5), the one that explains most first.
_STATES: Final = {
    "D": "uninterruptible sleep",
    "T": "stopped",
    "R": "running",
    "S": "sleeping",
    "Z": "zombie",
}


def sleeping_in(pid: int) -> str:
    """Return the state of a process and the kernel function in which it sleeps, for an error.

    For example ``state D (uninterruptible sleep), in request_wait_answer``. A thread in state D is preferred
    to others. The function is left out where the kernel does not tell it (``wchan`` of proc(5)).
    """
    states = list(_threads(pid))
    if not states:
        return "state unknown"
    order = list(_STATES)
    state, function = min(
        states, key=lambda thread: order.index(thread[0]) if thread[0] in order else len(order)
    )
    where = f", in {function}" if function not in ("", "0") else ""
    return f"state {state} ({_STATES.get(state, 'see proc(5)')}){where}"


def run(command: Sequence[str], *, timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output; raise TimeoutExpired if it does not end in time.

    ``options``: those of ``subprocess.Popen``. The program is killed when its time is over, and given up if
    that does not end it.
    """
    process = subprocess.Popen(command, text=True, **options)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        raise
    finally:
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def end_group(process: subprocess.Popen[Any], patience_s: float) -> bool:
    """Wait for the end of a program that leads a process group; then kill the group.

    Returns False if it is still there after that.
    """
    for timeout_s in (patience_s, KILLED_S):
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
            return True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return False


def _threads(pid: int) -> Iterator[tuple[str, str]]:
    """Yield state and kernel function of each thread."""
    with suppress(OSError):  # the process has ended, or this is not Linux
        for folder in Path(f"/proc/{pid}/task").iterdir():
            function = ""
            with suppress(OSError):  # the thread has ended
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                with suppress(OSError):  # it needs the rights of a debugger
                    function = (folder / "wchan").read_text()
                yield state, function
