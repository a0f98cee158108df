"""The driver's side of callers: start them, ask them, leave none behind."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.shared.member import QUICK

#: Of the repository: where ``benchmarks`` is imported from.
ROOT = Path(__file__).parents[2]

_PR_SET_CHILD_SUBREAPER = 36
_START_S = 300.0
_STATE, _LEDGER = "FLOWER_GPU_STATE_DIR", "FLOWER_GPU_LEDGER_DIR"
#: A state folder with a fork server, for quick benchmarks: the tests have all of these share one.
_QUICK_STATE = "BENCHMARKS_QUICK_STATE_DIR"


class BenchmarkError(Exception):
    """The benchmark cannot go on; the message says why."""


class Member:
    """A process that runs one of the modules here and answers requests, one line of JSON each."""

    def __init__(
        self, name: str, module: str, *arguments: object, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> dict[str, Any]:
        return self._reply(_START_S)

    def ask(
        self, timeout_s: float, while_waiting: Callable[[], None] | None = None, **request: Any
    ) -> dict[str, Any]:
        self.send(request)
        return self._reply(timeout_s, while_waiting)

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing reply tells
            self._process.stdin.write(json.dumps(request) + "\n")

    def let_go(self) -> None:
        """Have it end by itself."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, timeout_s: float = 10) -> None:
        self.let_go()
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _reply(self, timeout_s: float, while_waiting: Callable[[], None] | None = None) -> dict[str, Any]:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not poll.poll(2 if while_waiting else 1000):
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{self.name}: no answer within {timeout_s:g} s")
            if while_waiting:
                while_waiting()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise BenchmarkError(f"{self.name}: ended with status {status}; its error is printed above")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def members(starts: Iterable[Callable[[], Member]]) -> Iterator[list[Member]]:
    """Start all, and end them all."""
    started: list[Member] = []
    try:
        for start in starts:
            started.append(start())
        for member in started:
            member.wait_until_ready()
        yield started
    finally:
        for member in started:
            member.close()


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Give our workers a state folder of their own, and end everything that is left at the end.

    A fork server leaves its caller's family on purpose. As their subreaper this process becomes its parent,
    so that it is counted with those it serves, and ended with them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise BenchmarkError(f"prctl: {os.strerror(ctypes.get_errno())}")
    # But for the ledger: others on this host have leases of the same GPUs.
    ours = [name for name in os.environ if name.startswith("FLOWER_GPU_") and name != _LEDGER]
    for name in ours:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="fgpu-bench-") as folder:
        os.environ[_STATE] = tempfile.mkdtemp(dir=folder)
        if QUICK in os.environ and _QUICK_STATE in os.environ:
            os.environ[_STATE] = os.environ[_QUICK_STATE]
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up as Ctrl-C does
        try:
            yield
        finally:
            end_descendants()


def new_state_folder() -> None:
    """Let members that are started from now on have a fork server of their own, unless all is tiny."""
    if QUICK in os.environ:
        return
    os.environ[_STATE] = tempfile.mkdtemp(dir=Path(os.environ[_STATE]).parent)


def ray_environment(folder: Path) -> dict[str, str]:
    """Return what keeps Ray on this machine, and its files in a folder."""
    return {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}


def end_descendants() -> None:
    """Kill what is below this process until nothing is."""
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def end_servers() -> None:
    """End the fork servers of callers that are gone. If all is tiny, the next callers use them."""
    if QUICK not in os.environ:
        end_descendants()


def cpu_s() -> float:
    """Return what the CPUs have taken by now for all that was ever below this process, ended or not."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has just ended, and is its parent's
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and of its children that it has waited for
    return own.ru_utime + own.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[int]:
    """Return the pids of all processes below ``root``."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has just ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
