"""A host with stub GPUs, its SuperLink, and SuperNodes that `flower-gpu` starts there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest
import run_programs
from launched import StubHost
from live_processes import processes_with
from waiting import until

from flower_gpu.launch import ports
from flower_gpu.workers.forkserver import control
from flower_gpu.workers.forkserver.identity import script_folders

APP = Path(__file__).parent / "unchanged_app"

#: `flower-gpu`. Other flags of Python would mean other fork servers.
COMMAND = (sys.executable, "-P", "-m", "flower_gpu.cli")


class Message(NamedTuple):
    """The processes of one message; 0 for what is not there yet."""

    #: Our `flwr-clientapp`, which the SuperNode starts.
    command: int
    #: The worker that it waits for.
    worker: int


class Federation:
    """A SuperLink on a host with GPUs of 16 GiB, a ledger and fork servers of its own; a context manager."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.folder = folder
        self.host = StubHost(folder / "host", gpus=gpus)
        self.state = folder / "state"
        self._processes: list[Process] = []
        self.pauses, self.trace, self._tmp = folder / "pauses", folder / "trace", folder / "tmp"
        for made in (self.state, self.pauses, self.trace, self._tmp, folder / "flwr"):
            made.mkdir(mode=0o700)
        self.port = ports.free_ports(1)[0]
        config = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / "flwr" / "config.toml").write_text(config)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FLOWER_GPU_")},
            **self.host.env,
            "HOME": str(folder),
            "TMPDIR": str(self._tmp),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLOWER_GPU_STATE_DIR": str(self.state),
            "FLOWER_GPU_SERVER_IDLE_S": "600",  # no fork server ends only because nobody has used it
            "PATH": os.pathsep.join([*script_folders(), os.environ["PATH"]]),
        }

    def __enter__(self) -> Federation:
        link = self.start(
            "superlink",
            *("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)),
            "--disable-runtime-dependency-installation",
        )
        until(lambda: not link.runs or ports.is_healthy(self.port), "the SuperLink answers")
        assert link.runs, link.output
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        for process in reversed(self._processes):
            process.end()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLOWER_GPU_STATE_DIR", str(self.state))
            control.stop()
        try:
            until(lambda: not self.processes(), "all processes have ended", 60)
        finally:
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if error is not None:
                error.add_note(self._ends_of_logs())

    @contextmanager
    def one_test(self) -> Iterator[None]:
        """For several tests with one SuperLink: what is started in this block ends with it.

        Pauses and trace are of this block alone.
        """
        there = len(self._processes)
        self.pauses, self.trace = (self.folder / f"{name}-{there}" for name in ("pauses", "trace"))
        for made in (self.pauses, self.trace):
            made.mkdir(mode=0o700)
        try:
            yield
        except BaseException as error:
            error.add_note(self._ends_of_logs())
            raise
        finally:
            for process in reversed(self._processes[there:]):
                process.end()

    def _ends_of_logs(self) -> str:
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("runs/*/*.log")])
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> Process:
        """Start a process of this host."""
        process = Process(name, command, {**self.env, **(env or {})}, self.folder)
        self._processes.append(process)
        return process

    def supernodes(self, count: int, *options: str, flower: tuple[str, ...] = ()) -> Process:
        """Start `flower-gpu supernode --count N`; their trace is in the folder of their logs."""
        command = (*COMMAND, "supernode", "--count", str(count), *options, "--log-dir", str(self.runs))
        return self.start(f"supernodes-{len(self._processes)}", *command, "--", *self._flower, *flower)

    def supernode(self, *options: str, node_config: str, env: Mapping[str, str] | None = None) -> Process:
        """Start `flower-gpu supernode`; the trace of all of these is in :attr:`trace`."""
        port = str(ports.free_ports(1)[0])
        flower = (*self._flower, "--port", port, "--node-config", node_config)
        name = f"supernode-{len(self._processes)}"
        env = {"FLOWER_GPU_RUN_DIR": str(self.trace), **(env or {})}
        return self.start(name, *COMMAND, "supernode", *options, "--", *flower, env=env)

    def users_of_fork_servers(self) -> int:
        """Return how many processes the fork servers of this host stay for."""
        command = [*COMMAND, "workers", "status"]
        done = run_programs.run(command, env=self.env)
        return sum(map(int, re.findall(r"used by (\d+) process", done.stdout)))

    def run(self, app: Path = APP, **config: bool | float | str) -> Process:
        """Submit a run, and follow its log."""
        name = f"run-{len(self._processes)}"
        file = self.folder / f"{name}.toml"
        if (app / APP.name).is_dir():  # the app, or a copy of it
            config["log_file"] = str(self.folder / f"{name}.serverapp.log")
        lines = (f"{key.replace('_', '-')} = {json.dumps(value)}\n" for key, value in config.items())
        file.write_text("".join(lines))
        return self.start(name, "flwr", "run", str(app), "here", "--stream", "--run-config", str(file))

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def _flower(self) -> tuple[str, ...]:
        return ("--insecure", "--superlink", f"127.0.0.1:{self.port}")

    def holders(self) -> list[str]:
        """Who holds a lease now."""
        return [one.id for one in self.host.status().holders]

    def waiting(self) -> list[str]:
        """Who waits for a lease now."""
        return [one.id for one in self.host.status().waiting]

    def processes(self) -> dict[int, str]:
        """Every process that has this host in its environment."""
        return processes_with("HOME", self.folder)

    def held(self, server_round: int) -> dict[int, int]:
        """Return the workers of a round that wait for :meth:`let_go`, by partition."""
        found = self.pauses.glob(f"{server_round}-*")
        return {int(path.name.partition("-")[2]): int(path.read_text()) for path in found}

    def let_go(self, server_round: int) -> None:
        """Let the messages of a round go on."""
        (self.pauses / f"go-{server_round}").touch()

    def messages(self) -> list[Message]:
        """Return the processes of the messages that are handled now."""
        found = []
        for pid, command in self.processes().items():
            # Its SuperNode has given it a token for this message; a ServerApp has one, too.
            if " --token " in command and "serverapp" not in command:
                found.append(Message(pid, waits_for(pid)))
        return found

    def files(self) -> set[str]:
        """Return the files that are neither logs, nor what the test or Flower has put there."""
        own = {"host", "flwr", "pauses", "runs", "trace"}
        files = [path.relative_to(self.folder) for path in self.folder.rglob("*") if not path.is_dir()]
        return {
            str(path) for path in files if path.parts[0] not in own and path.suffix not in (".log", ".toml")
        }


class Process:
    """A process that writes into a log."""

    def __init__(self, name: str, command: tuple[str, ...], env: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def server_output(self) -> str:
        """What the ServerApp of a run has logged."""
        log = self._log.with_suffix(".serverapp.log")
        return log.read_text(errors="replace") if log.exists() else ""

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; returns the exit status."""
        return self._process.wait(timeout_s)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        """End it, as a user does."""
        if self.runs:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def results_of(run: Process, server_round: int, kind: str = "train") -> tuple[str, list[str]]:
    """Return how many results and failures Flower has counted in a round, and the texts of the failures.

    As the ServerApp has logged it: what `flwr run` shows comes late on a busy machine, or not at all.
    """
    end = f"round {server_round} has ended"
    # Flower gives a node that is silent a minute.
    until(lambda: end in run.server_output or not run.runs, end, timeout_s=150)
    text = run.server_output.split(f"[ROUND {server_round}/")[-1].partition(end)[0]
    counted = re.search(rf"aggregate_{kind}: Received (\d+ results and \d+ failures)", text)
    assert counted is not None, run.server_output + run.output
    return counted[1], text.split("Received error in reply from node ")[1:]


def logs_of(fed: Federation, supernodes: Process) -> Path:
    """Return the folder in which several SuperNodes have their logs and their trace."""
    until(lambda: "logs in" in supernodes.output, "the SuperNodes' folder is there")
    match = re.search(r"logs in (\S+)\. ", supernodes.output)
    assert match is not None, supernodes.output
    return fed.folder / match[1]


def waits_for(pid: int) -> int:
    """Return the child that a process has a pidfd of; 0 where there is none."""
    with suppress(OSError):
        parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        for path in Path(f"/proc/{pid}/fdinfo").iterdir():
            with suppress(OSError):
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name == "Pid" and int(value) > 0 and value.strip() != parent:
                        return int(value)
    return 0


def sights(log: str) -> Iterator[dict[str, Any]]:
    """Yield what the app has seen of its processes, from the log of its SuperNode."""
    for line in log.splitlines():
        if line.startswith("saw {"):
            yield json.loads(line.removeprefix("saw "))
