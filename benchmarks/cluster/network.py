"""Hosts of a Ray cluster on this machine. Each has a CPU, and an interface whose bytes are counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shared.processes import ROOT, BenchmarkError

if TYPE_CHECKING:
    from cluster_hosts import Cluster, Place

_TESTS = (ROOT / "tests", ROOT / "tests/simulation", ROOT / "tests/simulation/cluster")
_INTERFACE, _BRIDGE = "eth0", "br0"
_START_S = 10.0


def cpus() -> list[int]:
    """Return the CPUs of two hosts; both have the same one where there is only one."""
    found = sorted(os.sched_getaffinity(0))
    return [found[0], found[1 if len(found) > 1 else 0]]


@contextmanager
def cluster(hosts: int = 2) -> Iterator[Cluster]:
    """Start a cluster: every other host is on the first CPU, the others are on the second.

    Raises
    ------
    BenchmarkError
        If there can be no such hosts here.
    """
    sys.path[:0] = [str(folder) for folder in _TESTS if str(folder) not in sys.path]
    import cluster_hosts

    env = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONPATH": str(ROOT),  # for rounds.py
        "RAY_worker_niceness": "0",  # of agents and their workers: others would have all of a CPU before them
    }
    if problem := cluster_hosts.problem():
        raise BenchmarkError(f"no hosts of a Ray cluster can be made here: {problem}")
    with (
        tempfile.TemporaryDirectory(prefix="fgpu-cluster-") as folder,
        _places(hosts) as places,
        cluster_hosts.Cluster(Path(folder), hosts, 0, places, **env) as found,
    ):
        yield found


@contextmanager
def _places(hosts: int) -> Iterator[list[Place]]:
    """Give each host a network namespace; a bridge in one more namespace connects them."""
    from cluster_hosts import Place
    from waiting import until

    here = Path("/proc/self/ns/net").readlink()
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(hosts + 1)]

    def is_apart(pid: int) -> bool:
        return Path(f"/proc/{pid}/ns/net").readlink() != here

    try:
        bridge, *pids = [holder.pid for holder in holders]
        for pid in [bridge, *pids]:
            if shutil.which("ip") is None or os.geteuid() != 0:
                raise BenchmarkError("network interfaces of hosts need `ip`, and root")
            until(partial(is_apart, pid), "a network namespace", _START_S)
        _ip(bridge, "link add", _BRIDGE, "type bridge")
        _ip(bridge, "link set", _BRIDGE, "up")
        places = []
        for number, pid in enumerate(pids):
            ip = f"10.77.0.{number + 1}"
            port = f"port{number}"
            _ip(bridge, "link add", port, "type veth peer name", _INTERFACE, "netns", str(pid))
            _ip(bridge, "link set", port, "master", _BRIDGE, "up")
            _ip(pid, "link set lo up")
            _ip(pid, "addr add", f"{ip}/24 dev", _INTERFACE)
            _ip(pid, "link set", _INTERFACE, "up")
            _ip(pid, "route add default dev", _INTERFACE)  # Ray looks there for the address of its host
            cpu = str(cpus()[number % 2])
            places.append(Place(ip, (*_in_network(pid), "taskset", "--cpu-list", cpu)))
        yield places
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _in_network(pid: int) -> Sequence[str]:
    return "nsenter", f"--net=/proc/{pid}/ns/net"


def _ip(pid: int, *words: str) -> None:
    command = [*_in_network(pid), "ip", *" ".join(words).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)}: {done.stderr.strip()}")


def counted_bytes(pid: int) -> tuple[int, int]:
    """Return how many bytes the host of a process has received and sent over its interface."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == _INTERFACE:
            values = figures.split()
            return int(values[0]), int(values[8])
    raise BenchmarkError(f"a host has no {_INTERFACE}")
