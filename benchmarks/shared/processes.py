"""Processes of a benchmark: start members, ask them, and leave no process behind."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.shared.member import QUICK

#: Root of the repository, from which ``benchmarks`` is imported.
ROOT = Path(__file__).parents[2]

_PR_SET_CHILD_SUBREAPER = 36
_START_S = 300.0
_STATE, _LEDGER = "FLOWER_GPU_STATE_DIR", "FLOWER_GPU_LEDGER_DIR"
#: State folder for ``--quick``. The tests set it, so that all quick benchmarks share one fork server.
_QUICK_STATE = "BENCHMARKS_QUICK_STATE_DIR"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BenchmarkError(Exception):
    """The benchmark cannot go on; the message gives the reason."""


class Member:
    """A process that runs a module of this package and answers requests, one line of JSON each."""

    def __init__(
        self, name: str, module: str, *arguments: object, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
            cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> dict[str, Any]:
        return self._reply(_START_S)

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and return the reply."""
        self.send(request)
        return self._reply(timeout_s)

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # If the process has exited, the missing reply becomes the error.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")

    def release(self) -> None:
        """Close the member's input. It exits after its current request."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, timeout_s: float = 10) -> None:
        """Wait until the member exits, and kill it after the timeout."""
        self.release()
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(1000 * timeout_s):
            raise BenchmarkError(f"{self.name}: no reply within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise BenchmarkError(f"{self.name}: exited with status {status}; its error is printed above")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def members(starts: Iterable[Callable[[], Member]]) -> Iterator[list[Member]]:
    """Start members, wait until all are ready, and close them at the end."""
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
def isolated() -> Iterator[None]:
    """Give our workers a state folder of their own, and kill all descendants at the end.

    A fork server leaves its caller's process tree on purpose. This process is its subreaper and so becomes
    its parent. Then the server is measured and killed together with its callers.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise BenchmarkError(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The ledger stays the host's, because other programs may hold leases on the same GPUs.
    for name in [name for name in os.environ if name.startswith("FLOWER_GPU_") and name != _LEDGER]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="fgpu-bench-") as folder:
        os.environ[_STATE] = tempfile.mkdtemp(dir=folder)
        if QUICK in os.environ and _QUICK_STATE in os.environ:
            os.environ[_STATE] = os.environ[_QUICK_STATE]
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Clean up as after Ctrl-C.
        try:
            yield
        finally:
            end_descendants()


def new_state_folder() -> None:
    """Set an empty state folder. Members get a new fork server from now on.

    Under ``--quick`` the folder stays the same.
    """
    if QUICK not in os.environ:
        os.environ[_STATE] = tempfile.mkdtemp(dir=Path(os.environ[_STATE]).parent)


def flower_environment() -> dict[str, str]:
    """Return the environment of processes that run Flower: no telemetry, and importable benchmarks."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def ray_environment(folder: Path) -> dict[str, str]:
    """Return variables that keep Ray on this machine, and its files in a folder."""
    return {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}


def end_descendants() -> None:
    """Kill the processes below this one until none is left."""
    while pids := descendants(os.getpid()):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def end_servers() -> None:
    """Kill idle fork servers. Under ``--quick`` they stay for the next callers."""
    if QUICK not in os.environ:
        end_descendants()


def cpu_s() -> float:
    """Return the CPU seconds of all current and former processes below this one."""
    exited = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The last two times are of children for which the process has waited.
    running = (sum(cpu_times_s(pid)) for pid in descendants(os.getpid()))
    return exited.ru_utime + exited.ru_stime + sum(running)


def cpu_times_s(pid: int) -> tuple[float, ...]:
    """Return user and system CPU seconds of a process and then of its children; zeros after its exit."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return tuple(int(field) / _TICKS_PER_S for field in fields[11:15])
    return 0.0, 0.0, 0.0, 0.0


def descendants(root: int) -> list[int]:
    """Return the pids of all processes below ``root``."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # The process has just exited.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    pids: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        pids += below
        pending += below
    return pids
