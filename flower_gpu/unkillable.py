"""Processes that SIGKILL does not end.

The kernel delivers SIGKILL when a thread returns from the kernel. A thread in uninterruptible sleep (state D)
does not return before its event: an answer of a GPU that fell off the bus, of a network disk with a dead
server, or of a FUSE file system. This may take minutes, or for ever.

So each wait for a killed process needs a limit. After :data:`KILLED_S`, the caller of a worker goes on, and a
separate thread waits for the worker's end. Until then, the worker and that thread keep the ticket of the
lease locked, so its memory is not granted to another claim.

``subprocess.run`` with a timeout waits without a limit for the end of the killed program, also in Python
3.14. :func:`run` replaces it for programs that use a driver.

A process exists until its last thread has ended. Its first thread may be a zombie while another thread
sleeps, so :func:`sleeping_in` looks at all threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

#: Seconds after SIGKILL until a process counts as unkillable. Freeing the memory of a large process, or a
#: CUDA context, takes a second or two.
KILLED_S: Final = 5.0

# States of proc(5), sorted by how well they explain an unkillable process
_STATES: Final = {
    "D": "uninterruptible sleep",
    "T": "stopped",
    "R": "running",
    "S": "sleeping",
    "Z": "zombie",
}


def sleeping_in(pid: int) -> str:
    """Return the state of a process and the kernel function in which it sleeps, for an error message.

    For example ``state D (uninterruptible sleep), in request_wait_answer``. A thread in state D is preferred.
    The function (``wchan`` of proc(5)) is left out if the kernel does not show it.
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
    """Run a program and return its output. Raises TimeoutExpired if it does not end in time.

    The program is killed at the timeout, and abandoned if it does not end then.

    ``options``: options of ``subprocess.Popen``.
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
    """Wait for the end of a program that leads a process group, and kill the group after ``patience_s``.

    Returns False if the program still exists after that.
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
