"""Lines of workers for tests, with a look at what they leave behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from processes import Status, all_processes, wait_until, zombies_of

from flower_gpu.workers import methods, state_folder
from flower_gpu.workers.call import Call, Task
from flower_gpu.workers.caller import Line


class Caller:
    """One who has calls run on lines of workers."""

    def __init__(self, start_method: str = "forkserver", **of_calls: Any) -> None:
        self.method = methods.METHODS[start_method]
        self.of_calls = {"without": frozenset({"torch"}), **of_calls}  # importing it takes seconds
        self.lines: list[Line] = []
        #: Every worker that was seen, in order.
        self.pids: list[int] = []

    def line(self) -> Line:
        self.lines.append(Line())
        return self.lines[-1]

    def run(self, task: Task, *args: Any, line: Line | None = None, **options: Any) -> Any:
        """Run a call on a line, by default on the first one."""
        if line is None:
            line = self.lines[0] if self.lines else self.line()
        names = ("env", "kwargs", "setup", "held", "preload")
        of_call = {**self.of_calls, **{name: options.pop(name) for name in names if name in options}}
        line.begin()
        options.setdefault("on_start", lambda pid, _: self.pids.append(pid))
        return line.run(Call(task, args, label="a test's call", **of_call), self.method, **options)

    def server_pid(self) -> int:
        """Return the fork server of the first line."""
        pid: int = self.run("os:getppid")
        return pid

    def close(self) -> None:
        """End everything, and check that nothing is left."""
        for line in self.lines:
            line.close()
        assert wait_until(lambda: not left_of(self.pids)), left_of(self.pids)
        assert zombies_of(os.getpid()) == []
        left = (state_folder.state_dir() / "sockets").glob("*")
        assert not [path for path in left for pid in self.pids if path.name.endswith(f"-{pid}")]


def left_of(groups: Iterable[int]) -> list[Status]:
    """Return the processes of these groups that are not dead."""
    wanted = set(groups)
    return [one for one in all_processes() if one.group in wanted and one.state not in "ZX"]


def descriptors_of(pid: int) -> int:
    """Return how many descriptors a process has."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has to itself."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def settled(look: Callable[[], int], expected: int) -> bool:
    """Wait until a count is what it should be."""
    return wait_until(lambda: look() == expected, 5)
