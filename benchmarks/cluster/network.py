"""Hosts of a Ray cluster on this machine. Each has a CPU and a network interface that counts bytes."""

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
    """Return the CPUs of two hosts. With a single core, both hosts have the same CPU."""
    first, *others = sorted(os.sched_getaffinity(0))
    return [first, others[0] if others else first]


@contextmanager
def cluster(hosts: int = 2) -> Iterator[Cluster]:
    """Start a cluster whose hosts alternate between the two CPUs.

    Raises
    ------
    BenchmarkError
        If such hosts cannot be made here.
    """
    sys.path[:0] = [str(folder) for folder in _TESTS if str(folder) not in sys.path]
    # The modules of the tests read this when they are imported.
    os.environ.setdefault("TESTS_SHARED_STATE_DIR", os.environ["FLOWER_GPU_STATE_DIR"])
    import cluster_hosts

    env = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # By default, agents and their workers yield a busy CPU to all other processes.
        "RAY_worker_niceness": "0",
    }
    if problem := cluster_hosts.problem():
        raise BenchmarkError(f"a Ray cluster cannot be made here: {problem}")
    with (
        tempfile.TemporaryDirectory(prefix="fgpu-cluster-") as folder,
        _places(hosts) as places,
        cluster_hosts.Cluster(Path(folder), hosts, 0, places, **env) as cluster,
    ):
        yield cluster


@contextmanager
def _places(hosts: int) -> Iterator[list[Place]]:
    """Give each host a network namespace. A bridge in another namespace connects them."""
    from cluster_hosts import Place
    from waiting import until

    own_namespace = Path("/proc/self/ns/net").readlink()
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(hosts + 1)]

    def is_apart(pid: int) -> bool:
        return Path(f"/proc/{pid}/ns/net").readlink() != own_namespace

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
            # Ray takes the address of its host from the default route.
            _ip(pid, "route add default dev", _INTERFACE)
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
    """Return the bytes that the host of a process has received and sent over its interface."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == _INTERFACE:
            values = figures.split()
            return int(values[0]), int(values[8])
    raise BenchmarkError(f"a host has no {_INTERFACE}")
