"""A run of an app on the hosts of a cluster, and what it takes: time, CPUs, memory, bytes over the wire."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cluster import network
from benchmarks.shared.processes import ROOT, BenchmarkError
from benchmarks.shared.weights import MB
from benchmarks.simulation.engines import TIMEOUT_S, Run
from flower_gpu import trace

if TYPE_CHECKING:
    import cluster_hosts

#: Processes of a host; of the first one there is the driver, too.
KINDS = ("driver", "agent", "ray")

_APPS = ROOT / "benchmarks/simulation/apps"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.01  # between two looks whether a round is over
_RAY = ("/ray/", "/ray start", "ray::IDLE")


@dataclass(frozen=True)
class Sample:
    """What was counted until the end of a round.

    Attributes
    ----------
    rounds : int
        How many were over.
    at_s : float
        As ``time.monotonic()`` gives it.
    cpu_s : dict of tuple of int and str to float
        By host and kind of process.
    bytes : list of tuple of int and int
        What each host has received and sent.
    """

    rounds: int
    at_s: float
    cpu_s: dict[tuple[int, str], float]
    bytes: list[tuple[int, int]]


@dataclass(frozen=True)
class Done:
    """What a run gave.

    Attributes
    ----------
    total_s : float
        From the start of the command to its end.
    rounds_s : list of float
        What the app has written down.
    model : list of arrays
        The final one, if the app leaves it.
    messages : list of int
        That each host has handled in a round, on average.
    samples : list of Sample
        At the end of each round, if it was watched.
    peak_mb : dict of tuple of int and str to float
        The highest RSS of the driver and of agents, if it was watched.
    """

    total_s: float
    rounds_s: list[float]
    model: list[NDArray[Any]] = field(default_factory=list)
    messages: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    peak_mb: dict[tuple[int, str], float] = field(default_factory=dict)

    @property
    def round_s(self) -> float:
        """The median of the rounds after the first."""
        return median(self.rounds_s[1:] or self.rounds_s)

    @property
    def counted_rounds(self) -> int:
        """How many rounds were watched: those after the first."""
        return self.samples[-1].rounds - self.samples[0].rounds

    @property
    def watched_s(self) -> float:
        """Return how long these rounds took."""
        return self.samples[-1].at_s - self.samples[0].at_s

    def cpu_s(self, kind: str, host: int | None = None) -> float:
        """Return the CPU seconds of a kind of processes in a round, on all hosts or on one."""
        first, last = self.samples[0].cpu_s, self.samples[-1].cpu_s
        took_s = [last[key] - first[key] for key in last if key[1] == kind and host in (None, key[0])]
        return sum(took_s) / self.counted_rounds

    def wire_bytes(self, host: int) -> tuple[float, float]:
        """Return what a host received and sent in a round."""
        first, last = self.samples[0].bytes[host], self.samples[-1].bytes[host]
        received, sent = (after - before for before, after in zip(first, last, strict=True))
        return received / self.counted_rounds, sent / self.counted_rounds


def perform(run: Run, cluster: cluster_hosts.Cluster, *, is_watched: bool = False) -> Done:
    """Run an app on a cluster, with nothing left of the runs before.

    Raises
    ------
    BenchmarkError
        If the command fails; with the end of its output.
    """
    where = f"{run.app}, {len(cluster.hosts)} hosts"
    for host in cluster.hosts:
        for path in (host.folder / "state").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with tempfile.TemporaryDirectory(dir=cluster.folder) as name:
        folder = Path(name)
        config = {"strategy": "ours", **run.config, "figures": str(folder / "figures.json")}
        if run.saves_model:
            config["model"] = str(folder / "model.npz")
        options = ["--run-config", " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())]
        options += ["--seed", "0", *run.options]
        began = time.perf_counter()
        with cluster.running(
            str(_APPS / run.app), run.clients, *options, name=f"{folder.name}/runs"
        ) as running:
            watch = Watch(cluster, running) if is_watched else None
            try:
                if watch is not None:
                    watch.look(TIMEOUT_S)
                running.wait(TIMEOUT_S)
            except BaseException as error:
                # Else the driver would be a child of this process then, and its host could not end.
                with suppress(OSError, IndexError):
                    running.send(signal.SIGKILL)
                    running.process.wait()
                if isinstance(error, AssertionError):
                    raise BenchmarkError(f"{where}: {str(error)[-4000:]}") from None
                raise
        total_s = time.perf_counter() - began
        if running.status or not (folder / "figures.json").exists():
            raise BenchmarkError(f"{where}: ended with status {running.status}\n{running.output[-4000:]}")
        if watch is not None and len(watch.samples) < 2:
            raise BenchmarkError(f"{where}: the rounds were too short to count what they use")
        rounds_s = json.loads((folder / "figures.json").read_text())["rounds_s"]
        messages = {each["host"]: each["messages"] / len(rounds_s) for each in running.summary["hosts"]}
        return Done(
            total_s,
            rounds_s,
            _model(folder / "model.npz") if run.saves_model else [],
            [messages.get(host.name, 0.0) for host in cluster.hosts],
            [] if watch is None else watch.samples,
            {} if watch is None else watch.peak_mb,
        )


class Watch:
    """Counts, at the end of each round, what processes and hosts have used until then."""

    def __init__(self, cluster: cluster_hosts.Cluster, run: cluster_hosts.Run) -> None:
        self.samples: list[Sample] = []
        self.peak_mb: dict[tuple[int, str], float] = {}
        self._hosts = cluster.hosts
        self._run = run
        self._pids: dict[tuple[int, str], list[int]] = {}
        self._events: trace.Follower | None = None
        self._trained = 0  # rounds

    def look(self, timeout_s: float) -> None:
        """Look until the run is over."""
        deadline = time.monotonic() + timeout_s
        while self._run.process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError, ValueError, IndexError):  # not there yet, or just gone
                rounds = self._rounds()
                if rounds and not self._pids:
                    self._pids = self._found()  # takes a while
                elif rounds > (self.samples[-1].rounds if self.samples else 0):
                    self._add(rounds)
            time.sleep(_LOOK_S)

    def _rounds(self) -> int:
        if not self._run.has_folder:
            return 0
        if self._events is None:
            self._events = trace.Follower(self._run.folder / trace.FILE_NAME)
        new = [(event["event"], event.get("task")) for event in self._events.read_new()]
        self._trained += new.count(("round_finished", "train"))
        return self._trained

    def _add(self, rounds: int) -> None:
        for key, pids in self._pids.items():
            if key[1] != "ray":
                self.peak_mb[key] = max(self.peak_mb.get(key, 0.0), sum(_peak_mb(pid) for pid in pids))
        self.samples.append(
            Sample(
                rounds,
                time.monotonic(),
                {key: sum(_cpu_s(pid) for pid in pids) for key, pids in self._pids.items()},
                [network.counted_bytes(host.first_pid) for host in self._hosts],
            )
        )

    def _found(self) -> dict[tuple[int, str], list[int]]:
        """Return the processes of each host. Those of agents' workers come and go and are not among them."""
        pid = self._run.process.pid  # nsenter, which has forked
        driver = [int(word) for word in _read(f"/proc/{pid}/task/{pid}/children").split()]
        found = {(0, "driver"): driver}
        for number, host in enumerate(self._hosts):
            commands = {pid: _command(pid) for pid in host.pids("") if pid not in driver}
            found[number, "agent"] = [pid for pid, words in commands.items() if "ray::Agent" in words]
            found[number, "ray"] = [
                pid for pid, words in commands.items() if any(name in words for name in _RAY)
            ]
        return found


def _model(path: Path) -> list[NDArray[Any]]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


def _command(pid: int) -> str:
    with suppress(OSError):
        # No more words: a worker is told folders of Ray in its fourth.
        return " ".join(_read(f"/proc/{pid}/cmdline").split("\0")[:3])
    return ""


def _cpu_s(pid: int) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _peak_mb(pid: int) -> float:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / MB
    return 0.0


def _read(path: str) -> str:
    return Path(path).read_text()
