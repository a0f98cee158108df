"""A host with stub GPUs for whole simulations, with separate Ray, Flower and leases."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from ledger_observer import observed
from nvml_stub import Host
from waiting import until

from flower_gpu import trace

FOLDER = Path(__file__).parent
START_S = (
    # Ray starts eight processes that take ten seconds of a core, and other tests may need the cores.
    300
)
_NOT_INHERITED = ("FLOWER_GPU", "FLWR_", "RAY_", "CUDA_", "NVIDIA_", "PYTORCH_", "LD_", "OMP_NUM_")


class SimulationHost:
    """A host with GPUs of 16 GiB, a ledger, and a place for Ray's files.

    Parameters
    ----------
    folder : Path
        Of this host.
    gpus : int
        How many GPUs it has.
    """

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.folder = folder
        self.stub = Host(folder / "stub", gpus=gpus)
        self.uuids, self.status = self.stub.uuids, self.stub.status
        self.run_dir = self.new_folder("run")
        # Ray creates sockets in this folder, and their paths are limited to 107 characters.
        self.ray = Path(tempfile.mkdtemp(prefix="fgpu-ray-"))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        self.env |= {
            **self.stub.env,
            "HOME": str(self.new_folder("home")),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "FLOWER_GPU_STATE_DIR": os.environ["FLOWER_GPU_STATE_DIR"],
            "FLOWER_GPU_RUN_DIR": str(self.run_dir),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(self.ray),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 << 20),
        }
        self._running = ExitStack()

    def new_folder(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True)
        return path

    def start(self, *command: str | Path, name: str = "output", **env: str) -> Program:
        """Start a program. It is ended with this host at the latest."""
        program = Program(command, self.folder / f"{name}.log", {**self.env, **env})
        self._running.callback(program.end)
        return program

    def run(self, *command: str | Path, name: str = "output", **env: str) -> str:
        """Run a program to its end. Return its output."""
        return self.start(*command, name=name, **env).succeeded()

    def observed(self) -> AbstractContextManager[list[dict[str, tuple[int, int]]]]:
        """Record continuously which process holds how much memory of which GPU."""
        return observed(
            self.stub.ledger,
            lambda holders: {
                holder.id: (self.uuids.index(part.uuid), part.memory_bytes)
                for holder in holders
                for part in holder.gpu_parts
            },
        )

    def events(self, *names: str, folder: Path | None = None) -> list[dict[str, Any]]:
        """Return the events with these names in the trace."""
        path = (folder or self.run_dir) / trace.FILE_NAME
        return [event for event in trace.read(path) if event["event"] in names]

    def processes(self) -> dict[int, str]:
        """Return the processes of this host's simulations, which have Ray's folder in their environment."""
        commands_by_pid = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # The fork server is shared with other tests, and stays.
                if (
                    str(self.ray).encode() in (process / "environ").read_bytes()
                    and "flower_gpu.workers.forkserver" not in command
                ):
                    commands_by_pid[int(process.name)] = command
        return commands_by_pid

    def has_no_process(self) -> bool:
        return not self.processes()

    def end(self, pid: int) -> None:
        """Ask a process to end, and wait until it has ended."""
        os.kill(pid, signal.SIGTERM)
        until(lambda: pid not in self.processes(), self.processes, START_S)

    def end_programs(self) -> None:
        """End the programs that a failed test has not ended."""
        self._running.close()

    def close(self) -> None:
        """Remove the files outside the test's own folder."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.ray, ignore_errors=True)


NewHost = Callable[..., SimulationHost]


class Program:
    """A program in a separate process group, as a shell starts it, with its output in a file."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: dict[str, str]) -> None:
        self._log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def __str__(self) -> str:
        return self.output

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition while the program lives. If it ends, the error shows its output."""
        until(lambda: condition() or self.process.poll() is not None, self, START_S)
        assert condition(), f"it has ended:\n{self.output}"

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for the end of the program. Return its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output}") from None

    def succeeded(self) -> str:
        """Wait for the end of the program. Return its output."""
        assert self.wait() == 0, self.output
        return self.output

    def end(self) -> None:
        """Kill the program, unless it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def notes(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines in a file, or an empty list if the file does not exist yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
