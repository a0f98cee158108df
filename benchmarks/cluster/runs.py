"""A run of the app on a cluster: its time, CPU time, memory, and bytes over the wire."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cluster import network
from benchmarks.shared.app import config_pairs, copy_app
from benchmarks.shared.member import peak_mb
from benchmarks.shared.processes import BenchmarkError, cpu_times_s
from benchmarks.simulation import engines
from benchmarks.simulation.engines import TIMEOUT_S, Run, read_model
from flower_gpu import trace

if TYPE_CHECKING:
    import cluster_hosts

#: Number of a host, and kind of a process: "driver" (on the first host), "agent" or "ray".
Kind = tuple[int, str]

_LOOK_S = 0.01
_RAY = ("/ray/", "/ray start", "ray::IDLE")


@dataclass(frozen=True)
class Sample:
    """Counters at the end of a round.

    Attributes
    ----------
    rounds : int
        Number of finished rounds.
    at_s : float
        Time on the clock of ``time.monotonic()``.
    cpu_s : dict
        CPU seconds by host and kind of process.
    bytes : list of (int, int)
        Bytes that each host has received and sent.
    """

    rounds: int
    at_s: float
    cpu_s: dict[Kind, float]
    bytes: list[tuple[int, int]]


@dataclass(frozen=True)
class Result(engines.Result):
    """Figures of a run.

    Attributes
    ----------
    messages : list of float
        Mean number of messages per round on each host.
    samples : list of Sample
        Counters at the ends of rounds, if the run was watched. The first round is not counted.
    peaks_mb : dict
        Highest RSS of the driver and the agents, if the run was watched.
    """

    messages: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    peaks_mb: dict[Kind, float] = field(default_factory=dict)

    @property
    def counted_rounds(self) -> int:
        return self.samples[-1].rounds - self.samples[0].rounds

    @property
    def watched_s(self) -> float:
        """Seconds of the counted rounds."""
        return self.samples[-1].at_s - self.samples[0].at_s

    def cpu_s(self, kind: str, host: int | None = None) -> float:
        """Return the CPU seconds per round of a kind of process, on one host or on all."""
        first, last = self.samples[0].cpu_s, self.samples[-1].cpu_s
        used_s = [last[key] - first[key] for key in last if key[1] == kind and host in (None, key[0])]
        return sum(used_s) / self.counted_rounds

    def wire_bytes(self, host: int) -> tuple[float, float]:
        """Return the bytes per round that a host received and sent."""
        first, last = self.samples[0].bytes[host], self.samples[-1].bytes[host]
        received, sent = (after - before for before, after in zip(first, last, strict=True))
        return received / self.counted_rounds, sent / self.counted_rounds


def perform(run: Run, cluster: cluster_hosts.Cluster, *, is_watched: bool = False) -> Result:
    """Perform a run on a cluster, with empty state folders on all hosts.

    Raises
    ------
    BenchmarkError
        If the command fails; with the last lines of its output.
    """
    where = f"{run.client}, {len(cluster.hosts)} hosts"
    for host in cluster.hosts:
        for path in (host.folder / "state").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with tempfile.TemporaryDirectory(dir=cluster.folder) as name:
        folder = Path(name)
        options = ["--run-config", config_pairs(run.run_config(folder)), "--seed", "0", *run.options]
        app = str(copy_app(run.client, folder))
        began = time.perf_counter()
        with cluster.running(app, run.clients, *options, name=f"{folder.name}/runs") as running:
            watch = Watch(cluster, running)
            try:
                if is_watched:
                    watch.look(TIMEOUT_S)
                running.wait(TIMEOUT_S)
            except BaseException as error:
                # As a child of this process, a remaining driver would keep its host from ending.
                with suppress(OSError, IndexError):
                    running.send(signal.SIGKILL)
                    running.process.wait()
                if isinstance(error, AssertionError):
                    raise BenchmarkError(f"{where}: {str(error)[-4000:]}") from None
                raise
        total_s = time.perf_counter() - began
        if running.status or not (folder / "figures.json").exists():
            raise BenchmarkError(f"{where}: exited with status {running.status}\n{running.output[-4000:]}")
        if is_watched and len(watch.samples) < 2:
            raise BenchmarkError(f"{where}: the rounds were too short for counting")
        figures = json.loads((folder / "figures.json").read_text())
        rounds = len(figures["rounds_s"])
        messages = {each["host"]: each["messages"] / rounds for each in running.summary["hosts"]}
        return Result(
            total_s,
            0.0,
            None,
            figures,
            read_model(folder / "model.npz") if run.saves_model else [],
            messages=[messages.get(host.name, 0.0) for host in cluster.hosts],
            samples=watch.samples,
            peaks_mb=watch.peaks_mb,
        )


class Watch:
    """Samples counters of processes and hosts at the end of each round."""

    def __init__(self, cluster: cluster_hosts.Cluster, run: cluster_hosts.Run) -> None:
        self.samples: list[Sample] = []
        self.peaks_mb: dict[Kind, float] = {}
        self._hosts = cluster.hosts
        self._run = run
        self._pids: dict[Kind, list[int]] = {}
        self._events: trace.Follower | None = None
        self._finished_rounds = 0

    def look(self, timeout_s: float) -> None:
        """Sample until the run is over."""
        deadline = time.monotonic() + timeout_s
        while self._run.process.poll() is None and time.monotonic() < deadline:
            # Processes may not exist yet, or may have just exited.
            with suppress(OSError, ValueError, IndexError):
                rounds = self._rounds()
                if rounds and not self._pids:
                    self._pids = self._processes()
                elif rounds > (self.samples[-1].rounds if self.samples else 0):
                    self._add(rounds)
            time.sleep(_LOOK_S)

    def _rounds(self) -> int:
        if not self._run.has_folder:
            return 0
        if self._events is None:
            self._events = trace.Follower(self._run.folder / trace.FILE_NAME)
        new = [(event["event"], event.get("task")) for event in self._events.read_new()]
        self._finished_rounds += new.count(("round_finished", "train"))
        return self._finished_rounds

    def _add(self, rounds: int) -> None:
        for key, pids in self._pids.items():
            if key[1] != "ray":
                self.peaks_mb[key] = max(self.peaks_mb.get(key, 0.0), sum(map(peak_mb, pids)))
        cpu_s = {key: sum(sum(cpu_times_s(pid)[:2]) for pid in pids) for key, pids in self._pids.items()}
        counted = [network.counted_bytes(host.first_pid) for host in self._hosts]
        self.samples.append(Sample(rounds, time.monotonic(), cpu_s, counted))

    def _processes(self) -> dict[Kind, list[int]]:
        """Return the pids on each host, without the agents' workers, which come and go."""
        # The driver is a child of nsenter.
        pid = self._run.process.pid
        driver = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        pids = {(0, "driver"): driver}
        for number, host in enumerate(self._hosts):
            commands = {pid: _command(pid) for pid in host.pids("") if pid not in driver}
            pids[number, "agent"] = [pid for pid, words in commands.items() if "ray::Agent" in words]
            pids[number, "ray"] = [
                pid for pid, words in commands.items() if any(name in words for name in _RAY)
            ]
        return pids


def _command(pid: int) -> str:
    with suppress(OSError):
        # The fourth word of a worker's command names folders of Ray.
        return " ".join(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:3])
    return ""
