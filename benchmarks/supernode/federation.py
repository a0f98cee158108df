"""A SuperLink and SuperNodes on this machine, and what is measured of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import memory
from benchmarks.shared.member import QUICK
from benchmarks.shared.processes import ROOT, BenchmarkError, descendants, end_descendants
from flower_gpu.flower.commands import with_flowers
from flower_gpu.launch import ports
from flower_gpu.workers.forkserver import control

_START_S = 180.0
_SETTLE_S, _QUICK_SETTLE_S = 10.0, 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Federation:
    """SuperNodes that are registered, and wait."""

    nodes: list[int]  # the processes that were started for them
    registered_s: float  # from the start of the first one until all were


def environment(flwr_home: str) -> dict[str, str]:
    """Return the environment of all processes of a run."""
    return {
        **os.environ,
        "FLWR_HOME": flwr_home,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # for both: ours sets it by itself
        "PATH": with_flowers(os.environ["PATH"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def federation(
    way: str, count: int, env: Mapping[str, str], folder: Path, options: Sequence[str] = ()
) -> Iterator[Federation]:
    """Start a SuperLink and SuperNodes, ours with these options, and end them."""
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
            # Its working folder is Flower's own: without -P apps that are confined could open it.
            ours = [sys.executable, "-P", "-m", "flower_gpu.cli", "supernode", "--count", str(count)]
            start("supernodes", *ours, *options, "--log-dir", str(folder), "--", *to_link)
        else:
            for number, node_port in enumerate(ports.free_ports(count)):
                config = f"partition-id={number} num-partitions={count}"
                node = ["flower-supernode", *to_link, "--port", str(node_port), "--node-config", config]
                start(f"supernode-{number}", *node)
        log = folder / "superlink.log"
        _wait(lambda: log.read_text().count("Activated node_id") >= count, started, "not all SuperNodes came")
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
        end_descendants()


def fork_servers() -> set[int]:
    """Return the host's fork servers of this benchmark, and what was forked from them."""
    return control.family() & set(descendants(os.getpid()))


def settled_mb(nodes: list[int]) -> float:
    """Return what these processes and those below them take when they do nothing any more."""
    last = 0.0
    while True:
        time.sleep(_QUICK_SETTLE_S if QUICK in os.environ else _SETTLE_S)
        now = memory.proportional_mb(_tree(nodes) - fork_servers())
        if abs(now - last) < 0.005 * now or QUICK in os.environ:
            return now
        last = now


class MessageTime:
    """The CPU time of all that SuperNodes start for messages, and of the fork servers.

    SuperNodes and SuperExecs themselves, which ask for messages also when there are none, are left out.
    """

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes
        forking = {pid for pid in _tree(nodes) if "Flower's programs" in _command(pid)} | fork_servers()
        self._waiting = _tree(nodes) - forking
        self._before = self._now()

    def used_s(self) -> float:
        """Return what it is since this object was made."""
        after = self._now()
        # A fork server that has ended and was nobody's child takes its time with it: then at least what the
        # others have used.
        difference = sum(after.values()) - sum(self._before.values())
        of_others = sum(used_s - self._before.get(key, 0.0) for key, used_s in after.items())
        return difference if difference > 0 else of_others

    def _now(self) -> dict[tuple[str, int], float]:
        # A process is told its children's time when it asks how they ended. The launcher asks that of fork
        # servers that have a successor.
        pids = _tree(self._nodes) | fork_servers()
        ended = {("below", pid): sum(_times_s(pid)[2:]) for pid in pids}
        return ended | {("own", pid): sum(_times_s(pid)[:2]) for pid in pids - self._waiting}


def _tree(nodes: list[int]) -> set[int]:
    return {*nodes, *(pid for node in nodes for pid in descendants(node))}


def _times_s(pid: int) -> tuple[float, float, float, float]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0, 0.0, 0.0
    user, system, of_children, of_children_in_kernel = (int(field) / _TICKS for field in fields[11:15])
    return user, system, of_children, of_children_in_kernel


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _wait(is_so: Callable[[], bool], started: Sequence[subprocess.Popen[bytes]], problem: str) -> None:
    deadline = time.monotonic() + _START_S
    while not is_so():
        for process in started:
            if process.poll() is not None:
                raise BenchmarkError(f"{problem}: {process.args} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{problem} within {_START_S:g} s")
        time.sleep(0.1)
