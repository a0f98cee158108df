"""Fork servers of runs and lines for tests, with a look at what they leave behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from processes import Status, all_processes, wait_until, zombies_of

from flower_gpu.workers import methods, socket_folder, state_folder
from flower_gpu.workers.call import Call, Task
from flower_gpu.workers.forkserver.line import Line
from flower_gpu.workers.forkserver.run_server import RunServer, RunServerSettings


class Caller:
    """One who has calls run on lines of a run's fork server."""

    def __init__(self, start_method: str = "forkserver", **settings: Any) -> None:
        settings.setdefault("without", frozenset({"torch"}))  # importing it takes seconds
        self.server = RunServer(RunServerSettings("a test", methods.named(start_method), **settings))
        self.lines: list[Line] = []
        #: Every worker that was seen, in order.
        self.pids: list[int] = []
        self.servers: set[int] = set()

    def line(self) -> Line:
        self.lines.append(Line(self.server))
        return self.lines[-1]

    def run(self, task: Task, *args: Any, line: Line | None = None, **options: Any) -> Any:
        """Run a call on a line, by default on the first one."""
        if line is None:
            line = self.lines[0] if self.lines else self.line()
        of_call = {name: options.pop(name) for name in ("env", "kwargs", "setup", "held") if name in options}
        line.begin()
        options.setdefault("on_start", lambda pid, _: self.pids.append(pid))
        return line.run(Call(task, args, label="a test's call", **of_call), **options)

    def server_pid(self) -> int:
        pid = self.server.process().pid
        self.servers.add(pid)
        return pid

    def close(self) -> None:
        """End everything, and check that nothing is left."""
        current = self.server._current
        if current is not None:
            self.servers.add(current.pid)
        self.server.close()
        for line in self.lines:
            line.close()
        groups = [*self.pids, *self.servers]
        assert wait_until(lambda: not left_of(groups)), left_of(groups)
        assert zombies_of(os.getpid()) == []
        socket_folder.remove_left()  # of a run's fork server that the test has killed
        folders = set((state_folder.state_dir() / "sockets").iterdir())
        assert not [path for path in folders for pid in groups if path.name.endswith(f"-{pid}")]


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
