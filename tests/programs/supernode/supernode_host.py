"""A host with stub GPUs, a SuperLink, and SuperNodes started by `flower-gpu`."""

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
from live_processes import processes_with
from nvml_stub import Host
from waiting import until

from flower_gpu.launch import ports
from flower_gpu.workers.forkserver import control
from flower_gpu.workers.forkserver.identity import script_folders

APP = Path(__file__).parent / "unchanged_app"

#: The command `flower-gpu`. Processes with other flags of Python would use other fork servers.
COMMAND = (sys.executable, "-P", "-m", "flower_gpu.cli")


class Message(NamedTuple):
    """The processes of one message. A pid is 0 if the process has not started."""

    #: Pid of our `flwr-clientapp`, which the SuperNode starts.
    command: int
    #: Pid of the worker for which the command waits.
    worker: int


class Federation:
    """A SuperLink on a host with GPUs of 16 GiB and its own ledger and fork servers. A context manager."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.folder = folder
        self.host = Host(folder / "host", gpus=gpus)
        self.state = folder / "state"
        self._processes: list[Process] = []
        self.pauses, self.trace, self._tmp = folder / "pauses", folder / "trace", folder / "tmp"
        for path in (self.state, self.pauses, self.trace, self._tmp, folder / "flwr"):
            path.mkdir(mode=0o700)
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
            "FLOWER_GPU_SERVER_IDLE_S": "600",  # no fork server ends during a test because it is idle
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
        """Share one SuperLink between several tests. Processes started in this block end with it.

        The block has its own folders for pauses and trace.
        """
        started_before = len(self._processes)
        self.pauses, self.trace = (self.folder / f"{name}-{started_before}" for name in ("pauses", "trace"))
        for path in (self.pauses, self.trace):
            path.mkdir(mode=0o700)
        try:
            yield
        except BaseException as error:
            error.add_note(self._ends_of_logs())
            raise
        finally:
            for process in reversed(self._processes[started_before:]):
                process.end()

    def _ends_of_logs(self) -> str:
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("runs/*/*.log")])
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> Process:
        """Start a process on this host."""
        process = Process(name, command, {**self.env, **(env or {})}, self.folder)
        self._processes.append(process)
        return process

    def supernodes(self, count: int, *options: str, flower: tuple[str, ...] = ()) -> Process:
        """Start `flower-gpu supernode --count N`. The trace is in the folder of the logs."""
        command = (*COMMAND, "supernode", "--count", str(count), *options, "--log-dir", str(self.runs))
        return self.start(f"supernodes-{len(self._processes)}", *command, "--", *self._flower, *flower)

    def supernode(self, *options: str, node_config: str, env: Mapping[str, str] | None = None) -> Process:
        """Start `flower-gpu supernode`. All SuperNodes started like this share the folder :attr:`trace`."""
        port = str(ports.free_ports(1)[0])
        flower = (*self._flower, "--port", port, "--node-config", node_config)
        name = f"supernode-{len(self._processes)}"
        env = {"FLOWER_GPU_RUN_DIR": str(self.trace), **(env or {})}
        return self.start(name, *COMMAND, "supernode", *options, "--", *flower, env=env)

    def users_of_fork_servers(self) -> int:
        """Return the number of processes that keep the fork servers of this host running."""
        command = [*COMMAND, "workers", "status"]
        completed = run_programs.run(command, env=self.env)
        return sum(map(int, re.findall(r"used by (\d+) process", completed.stdout)))

    def run(self, app: Path = APP, **config: bool | float | str) -> Process:
        """Submit a run and follow its log."""
        name = f"run-{len(self._processes)}"
        file = self.folder / f"{name}.toml"
        if (app / APP.name).is_dir():  # true for the unchanged app and its copies, which have this setting
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
        """Return the ids of the leases that are held now."""
        return [entry.id for entry in self.host.status().holders]

    def waiting(self) -> list[str]:
        """Return the ids of the claims that wait now."""
        return [entry.id for entry in self.host.status().waiting]

    def processes(self) -> dict[int, str]:
        """Return all processes that have this host in their environment, with their command lines."""
        return processes_with("HOME", self.folder)

    def paused_workers(self, server_round: int) -> dict[int, int]:
        """Return the workers of a round that wait for :meth:`resume`, by partition."""
        paths = self.pauses.glob(f"{server_round}-*")
        return {int(path.name.partition("-")[2]): int(path.read_text()) for path in paths}

    def resume(self, server_round: int) -> None:
        """Let the paused messages of a round continue."""
        (self.pauses / f"go-{server_round}").touch()

    def messages(self) -> list[Message]:
        """Return the processes of the messages in progress."""
        messages = []
        for pid, command in self.processes().items():
            # A SuperNode passes a token to the command of a message. A ServerApp has a token, too.
            if " --token " in command and "serverapp" not in command:
                messages.append(Message(pid, waits_for(pid)))
        return messages

    def files(self) -> set[str]:
        """Return the files that were not created by the test or by Flower, without logs."""
        expected = {"host", "flwr", "pauses", "runs", "trace"}
        files = [path.relative_to(self.folder) for path in self.folder.rglob("*") if not path.is_dir()]
        return {
            str(path)
            for path in files
            if path.parts[0] not in expected and path.suffix not in (".log", ".toml")
        }


class Process:
    """A process whose output goes to a log file."""

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
        """Log of the ServerApp of a run."""
        log = self._log.with_suffix(".serverapp.log")
        return log.read_text(errors="replace") if log.exists() else ""

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the process and return its exit status."""
        return self._process.wait(timeout_s)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        """End the process as a user does, by SIGTERM."""
        if self.runs:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def results_of(run: Process, server_round: int, kind: str = "train") -> tuple[str, list[str]]:
    """Return Flower's count of results and failures in a round, and the texts of the failures.

    They are read from the log of the ServerApp. The output of `flwr run` comes late on a busy machine, or
    never.
    """
    end = f"round {server_round} has ended"
    # Flower waits a minute for a silent node.
    until(lambda: end in run.server_output or not run.runs, end, timeout_s=150)
    text = run.server_output.split(f"[ROUND {server_round}/")[-1].partition(end)[0]
    match = re.search(rf"aggregate_{kind}: Received (\d+ results and \d+ failures)", text)
    assert match is not None, run.server_output + run.output
    return match[1], text.split("Received error in reply from node ")[1:]


def logs_of(fed: Federation, supernodes: Process) -> Path:
    """Return the folder with the logs and the trace of several SuperNodes."""
    until(lambda: "logs in" in supernodes.output, "the folder of the SuperNodes is logged")
    match = re.search(r"logs in (\S+)\. ", supernodes.output)
    assert match is not None, supernodes.output
    return fed.folder / match[1]


def waits_for(pid: int) -> int:
    """Return the child for which a process holds a pidfd, or 0."""
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
    """Yield the app's reports about its processes from the log of its SuperNode."""
    for line in log.splitlines():
        if line.startswith("saw {"):
            yield json.loads(line.removeprefix("saw "))
