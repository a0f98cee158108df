"""Lines of workers for tests, and checks of what they leave behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import running_in_groups, wait_until, zombies_of

from flower_gpu.workers import methods, state_folder
from flower_gpu.workers.call import Call, Task
from flower_gpu.workers.caller import Line


class Caller:
    """A caller that runs calls on lines of workers."""

    def __init__(self, start_method: str = "forkserver", **call_options: Any) -> None:
        self.method = methods.METHODS[start_method]
        # Importing torch takes seconds.
        self.call_options = {"without": frozenset({"torch"}), **call_options}
        self.lines: list[Line] = []
        #: Pids of all workers so far, in order.
        self.pids: list[int] = []

    def line(self) -> Line:
        self.lines.append(Line())
        return self.lines[-1]

    def run(self, task: Task, *args: Any, line: Line | None = None, **options: Any) -> Any:
        """Run a call on a line, by default on the first one."""
        if line is None:
            line = self.lines[0] if self.lines else self.line()
        names = ("env", "kwargs", "setup", "lease_descriptor", "preload")
        call_fields = {**self.call_options, **{name: options.pop(name) for name in names if name in options}}
        line.begin()
        options.setdefault("on_start", lambda pid, _: self.pids.append(pid))
        return line.run(Call(task, args, label="a test's call", **call_fields), self.method, **options)

    def server_pid(self) -> int:
        """Return the pid of the first line's fork server."""
        pid: int = self.run("os:getppid")
        return pid

    def close(self) -> None:
        """Close all lines, and check that no process or socket is left."""
        for line in self.lines:
            line.close()
        assert wait_until(lambda: not running_in_groups(*self.pids)), running_in_groups(*self.pids)
        assert zombies_of(os.getpid()) == []
        sockets = (state_folder.state_dir() / "sockets").glob("*")
        assert not [path for path in sockets for pid in self.pids if path.name.endswith(f"-{pid}")]


def descriptors_of(pid: int) -> int:
    """Return the number of a process's open descriptors."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    """Return the bytes of memory that a process does not share with others."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def settled(look: Callable[[], int], expected: int) -> bool:
    """Wait until a count has the expected value. Return False if it does not have it in time."""
    return wait_until(lambda: look() == expected, 5)
