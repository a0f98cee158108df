"""A Ray cluster on this machine. Each of its hosts has namespaces of its own.

A host has separate process ids, name, ``/dev/shm``, folder for temporary files, ledger and state folder, and
stub GPUs. The hosts share the network and the folder of the test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nvml_stub
from scripted_app import variant
from waiting import until

from flower_gpu import trace

BIN = Path(sys.executable).parent
WAIT_S = 120
_NOT_INHERITED = ("FLOWER_GPU", "FLWR_", "RAY_", "CUDA_", "NVIDIA_", "PYTORCH_", "LD_", "OMP_NUM_")
_NAMESPACES = ("--mount", "--uts", "--pid")


@cache
def problem() -> str:
    """Return the reason why hosts cannot be created here, or an empty string."""
    # Ray is not imported: processes of other tests would inherit it.
    if importlib.util.find_spec("ray") is None:
        return "needs Ray"
    unshare, nsenter = shutil.which("unshare"), shutil.which("nsenter")
    if unshare is None or nsenter is None:
        return "needs unshare and nsenter"
    done = subprocess.run(
        [unshare, *_NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True
    )
    return done.stderr.strip()


@dataclass(frozen=True)
class Place:
    """Where a host runs on this machine.

    Attributes
    ----------
    ip : str
        The host's address.
    around : sequence of str
        Prefix that starts a command at this place in the command's own process, such as ``taskset --cpu-list
        0``.
    """

    ip: str = "127.0.0.1"
    around: Sequence[str] = ()


class Host:
    """One host of a cluster.

    Parameters
    ----------
    name : str
        Name of the host.
    folder : Path
        Folder for its files.
    address : str, optional
        Address of the head, or None if this host is the head.
    gpus : int
        Number of stub GPUs, with 16 GiB each.
    env : mapping, optional
        Additional environment variables.
    place : Place
        CPUs and network of the host, if they differ from those of this process.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        address: str | None,
        gpus: int = 0,
        env: Mapping[str, str] | None = None,
        place: Place = Place(),
    ) -> None:
        self.name = name
        self._around = place.around
        self.folder = folder
        folder.mkdir(parents=True)
        # Ray creates sockets in this folder, and their paths are limited to 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="fgpu-"))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        self.env |= nvml_stub.Host(folder / "stub", gpus=gpus, host=name).env
        self.env |= {
            "TMPDIR": str(self.temporary),
            "FLOWER_GPU_STATE_DIR": str(self._new("state")),
            "RAY_USAGE_STATS_ENABLED": "0",
            # The environment of an agent's worker is not that of a prestarted worker.
            "RAY_prestart_worker_first_driver": "0",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONDONTWRITEBYTECODE": "1",
            **(env or {}),
        }
        if address is None:
            self.port = free_port()
            where = ["--head", "--port", str(self.port), "--include-dashboard=false", "--no-monitor"]
        else:
            where = ["--address", address]
        ray = [str(BIN / "ray"), "start", *where, "--node-ip-address", place.ip, "--num-cpus", "1"]
        ray += ["--object-store-memory", str(100 << 20), "--disable-usage-stats", "--block"]
        ray += ["--include-log-monitor=false"]
        if address is None:
            ray += ["--temp-dir", str(self.temporary / "ray")]
        script = f"mount -t tmpfs tmpfs /dev/shm && hostname {name} && {shlex.join(ray)} & wait"
        self.log = folder / "ray.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(*place.around, "unshare", *_NAMESPACES, "--fork", "--mount-proc", "--kill-child"),
                    *("bash", "-c", script),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )

    def _new(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        return path

    @property
    def is_up(self) -> bool:
        """True if Ray reports that it has started."""
        text = self.log.read_text()
        has_started = "Ray runtime started" in text
        assert has_started or self._process.poll() is None, text
        return has_started

    @property
    def first_pid(self) -> int:
        """Pid, seen from outside, of the process whose end ends all processes of this host."""
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def pids(self, words: str) -> list[int]:
        """Return the pids of this host's processes whose command line contains ``words``."""
        mine = Path(f"/proc/{self.first_pid}/ns/pid").readlink()
        matches = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (path / "ns/pid").readlink() == mine:
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words in command:
                        matches.append(int(path.name))
            except OSError:
                continue
        return matches

    def inside(self, command: list[str]) -> list[str]:
        """Return the command that runs ``command`` on this host."""
        return [*self._around, "nsenter", "--target", str(self.first_pid), *_NAMESPACES, *command]

    def end(self) -> None:
        """End all processes of this host at once, as a power failure would."""
        if self._process.poll() is None:
            os.kill(self.first_pid, signal.SIGKILL)
            self._process.wait(60)
        shutil.rmtree(self.temporary, ignore_errors=True)


class Cluster:
    """A Ray cluster. The driver runs on its first host."""

    def __init__(
        self, folder: Path, hosts: int = 2, gpus: int = 0, places: Sequence[Place] = (), **env: str
    ) -> None:
        self.folder = folder
        self.gpus = gpus
        # Places of the first hosts
        self._places = places
        self._env = env
        self._count = hosts
        self.hosts: list[Host] = []

    def __enter__(self) -> Cluster:
        try:
            for _ in range(self._count):
                self.add()
            until(lambda: self.hosts[-1].is_up, self.hosts[-1].name, WAIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in reversed(self.hosts):
            host.end()

    @property
    def address(self) -> str:
        """Address of the head."""
        return f"{self._place(0).ip}:{self.hosts[0].port}"

    def _place(self, number: int) -> Place:
        return self._places[number] if number < len(self._places) else Place()

    def add(self) -> Host:
        """Start one more host."""
        number = len(self.hosts)
        name = f"host-{number}"
        # Hosts start in turn, because hosts that start together may choose the same ports.
        if self.hosts:
            until(lambda: self.hosts[-1].is_up, self.hosts[-1].name, WAIT_S)
        address = self.address if self.hosts else None
        host = Host(name, self.folder / name, address, self.gpus, self._env, self._place(number))
        self.hosts.append(host)
        return host

    @contextmanager
    def running(
        self, app: str | Path, nodes: int, *options: str, name: str = "runs", **env: str
    ) -> Iterator[Run]:
        """Start a simulation on the cluster. It is killed at the end of the block."""
        head = self.hosts[0]
        command = [
            str(BIN / "flower-gpu"),
            "simulate",
            str(app if isinstance(app, Path) else variant(app)),
            "--num-supernodes",
            str(nodes),
        ]
        command += ["--ray-address", self.address, *options]
        if "--resume" not in options:
            command += ["--log-dir", str(self.folder / name)]
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                head.inside(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**head.env, **env},
                start_new_session=True,
            )
        run = Run(process, self.folder / name, self.folder / f"{name}.log")
        try:
            yield run
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(60)

    def run(self, app: str | Path, nodes: int, *options: str, name: str = "runs", **env: str) -> Run:
        """Run a simulation on the cluster to its end."""
        with self.running(app, nodes, *options, name=name, **env) as run:
            run.wait()
        return run


class Run:
    """A simulation on a cluster."""

    def __init__(self, process: subprocess.Popen[bytes], logs: Path, log: Path) -> None:
        self.process = process
        self._logs = logs
        self._log = log

    @property
    def output(self) -> str:
        """Output of the command so far."""
        return self._log.read_text()

    @property
    def has_folder(self) -> bool:
        """True if the run has a folder of results."""
        return self._logs.exists()

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return max(self._logs.iterdir())

    @property
    def summary(self) -> dict[str, Any]:
        """Contents of ``result.json``."""
        summary: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return summary

    @property
    def status(self) -> int | None:
        """Exit status of the command, or None while it runs."""
        return self.process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the command, and not to the process that entered the host's namespaces."""
        pid = self.process.pid
        os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]), number)

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait for the end of the run."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on after {timeout_s:g} s:\n{self.output}") from None

    def says(self, text: str) -> None:
        """Wait until the run has printed a text."""
        until(lambda: text in self.output or self.process.poll() is not None, text, WAIT_S)
        assert text in self.output, self.output

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the events of clients in the run's trace."""
        all_events = trace.read(self.folder / trace.FILE_NAME)
        return [event for event in all_events if event["event"] in names and event.get("client") != "server"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
