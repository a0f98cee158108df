"""A SuperLink and SuperNodes on this machine, and figures of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import memory, processes
from benchmarks.shared.member import QUICK
from benchmarks.shared.processes import BenchmarkError, cpu_times_s, descendants
from flower_gpu.launch import ports
from flower_gpu.programs.commands import with_flowers
from flower_gpu.workers.forkserver import control

_START_S = 180.0
_SETTLE_S, _QUICK_SETTLE_S = 10.0, 2.0


@dataclass(frozen=True)
class Federation:
    """Registered, idle SuperNodes.

    Attributes
    ----------
    nodes : list of int
        Pids of the processes that were started for the SuperNodes.
    registered_s : float
        Seconds from the start of the first SuperNode until all were registered.
    """

    nodes: list[int]
    registered_s: float


def environment(flwr_home: str) -> dict[str, str]:
    """Return the environment of all processes of a federation."""
    return {
        **processes.flower_environment(),
        "FLWR_HOME": flwr_home,
        # Our command sets this itself, so it is the same for Flower's commands.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": with_flowers(os.environ["PATH"]),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def federation(
    way: str, count: int, env: Mapping[str, str], folder: Path, options: Sequence[str] = ()
) -> Iterator[Federation]:
    """Start a SuperLink and SuperNodes, and terminate them at the end.

    With ``way="ours"``, ``options`` go to ``flower-gpu supernode``.
    """
    port = ports.free_ports(1)[0]
    connection = f'[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (folder / "config.toml").write_text(f'[superlink]\ndefault = "bench"\n\n{connection}')
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder))

    try:
        address = ["--insecure", "--host", "127.0.0.1"]
        link = ["flower-superlink", *address, "--port", str(port)]
        start("superlink", *link, "--disable-runtime-dependency-installation")
        _wait(lambda: ports.is_healthy(port), started, "the SuperLink does not answer")
        began = time.monotonic()
        to_link = [*address, "--superlink", f"127.0.0.1:{port}"]
        if way == "ours":
            # Without -P, confined apps could open the working folder, because it would be in sys.path.
            ours = [sys.executable, "-P", "-m", "flower_gpu.cli", "supernode", "--count", str(count)]
            start("supernodes", *ours, *options, "--log-dir", str(folder), "--", *to_link)
        else:
            for number, node_port in enumerate(ports.free_ports(count)):
                config = f"partition-id={number} num-partitions={count}"
                node = ["flower-supernode", *to_link, "--port", str(node_port), "--node-config", config]
                start(f"supernode-{number}", *node)
        log = folder / "superlink.log"
        _wait(lambda: log.read_text().count("Activated node_id") >= count, started, "SuperNodes are missing")
        yield Federation([process.pid for process in started[1:]], time.monotonic() - began)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        processes.end_descendants()


def _wait(is_ready: Callable[[], bool], started: Sequence[subprocess.Popen[bytes]], problem: str) -> None:
    deadline = time.monotonic() + _START_S
    while not is_ready():
        for process in started:
            if process.poll() is not None:
                raise BenchmarkError(f"{problem}: {process.args} exited with status {process.returncode}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{problem} after {_START_S:g} s")
        time.sleep(0.1)


def fork_servers() -> set[int]:
    """Return the pids of this benchmark's fork servers and of their children."""
    return control.family() & set(descendants(os.getpid()))


def settled_mb(nodes: list[int]) -> float:
    """Return the memory of SuperNodes and their children once it no longer changes."""
    previous = 0.0
    while True:
        time.sleep(_QUICK_SETTLE_S if QUICK in os.environ else _SETTLE_S)
        current = memory.proportional_mb(_tree(nodes) - fork_servers())
        if abs(current - previous) < 0.005 * current or QUICK in os.environ:
            return current
        previous = current


class MessageTime:
    """CPU time of all processes that SuperNodes start for messages, and of the fork servers.

    It excludes the SuperNodes and SuperExecs themselves, which also poll while there are no messages.
    """

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes
        forking = {pid for pid in _tree(nodes) if "Flower's programs" in _command(pid)} | fork_servers()
        self._excluded = _tree(nodes) - forking
        self._before = self._times()

    def used_s(self) -> float:
        """Return the CPU seconds since this object was made."""
        after = self._times()
        # The time of a fork server is lost if its parent never waits for it. Then the result is a lower
        # bound: the time of the other processes.
        difference = sum(after.values()) - sum(self._before.values())
        of_others = sum(used_s - self._before.get(key, 0.0) for key, used_s in after.items())
        return difference if difference > 0 else of_others

    def _times(self) -> dict[tuple[str, int], float]:
        # A process inherits the times of its children by waiting for them. The launcher waits for replaced
        # fork servers.
        pids = _tree(self._nodes) | fork_servers()
        children = {("children", pid): sum(cpu_times_s(pid)[2:]) for pid in pids}
        return children | {("process", pid): sum(cpu_times_s(pid)[:2]) for pid in pids - self._excluded}


def _tree(nodes: list[int]) -> set[int]:
    return {*nodes, *(pid for node in nodes for pid in descendants(node))}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
