"""A host with stub GPUs for simulations, a ledger of its own, and what the trace says of leases there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvml_stub import Host
from shared_servers import SHARED_STATE
from simulations import TIMEOUT_S, Simulation, command
from waiting import until

from flower_gpu import trace
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.state import State


@dataclass(frozen=True)
class Running:
    """A simulation that goes on."""

    process: subprocess.Popen[bytes]
    logs: Path
    output: Path

    def ended(self) -> Simulation:
        """Wait for its end."""
        status = self.process.wait(TIMEOUT_S)
        folder = max(self.logs.iterdir()) if self.logs.is_dir() else self.logs
        return Simulation(status, self.output.read_text(), folder)


class StubHost:
    """A host with stub GPUs and a ledger of its own."""

    def __init__(self, folder: Path, gpus: int, host: Host | None = None, **fields: Any) -> None:
        self.host = host or Host(folder / "host", gpus=gpus, **fields)
        self.folder, self.ledger = folder, folder / "ledger"
        self.ledger.mkdir()
        self.logs = folder / "runs"
        # What PyTorch asks NVML would be told of a GPU that only NVML has.
        self.env = {
            **SHARED_STATE,
            "FLOWER_GPU_LEDGER_DIR": str(self.ledger),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
            "FLOWER_GPU_POLICY": "offer",
            # For clients of the app "leased": they take memory of the stub, and write down what they see.
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "LEASED_APP_NOTES": str(folder / "notes.jsonl"),
            "LEASED_APP_GO_ON": str(folder / "go-on"),
        }

    def simulate(self, nodes: int, *options: str, app: str = "plain", **env: str) -> Simulation:
        with self.simulating(nodes, *options, app=app, **env) as run:
            return run.ended()

    @contextmanager
    def simulating(
        self, nodes: int, *options: str, app: str = "plain", name: str = "runs", **env: str
    ) -> Iterator[Running]:
        """Start a simulation whose results go to a folder of this name; it is over with the block."""
        logs, output = self.folder / name, self.folder / f"{name}.log"
        with (
            output.open("w") as file,
            subprocess.Popen(
                command(app, nodes, "--log-dir", str(logs), *options),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.host.env, **self.env, **env},
            ) as process,
        ):
            try:
                yield Running(process, logs, output)
            finally:
                process.kill()

    @contextmanager
    def leased(self, count: int, asked: str) -> Iterator[None]:
        """Let another process of this host hold a lease: of so many GPUs, and so much of each."""
        program = [sys.executable, str(Path(__file__).parents[1] / "cli/lease_user.py")]
        with subprocess.Popen(
            [*program, "another", str(count), asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.host.env, **self.env},
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                assert [process.stdout.readline() for _ in range(2)] == ["asks\n", "granted\n"]
                yield
            finally:
                process.stdin.close()

    def status(self) -> State:
        """Return who has leases on this host, and who waits."""
        return Ledger(LedgerFolder(self.ledger)).status()

    def until(self, condition: Callable[[State], Any]) -> State:
        """Wait until the ledger says something; return what it says."""
        until(lambda: condition(self.status()), self.status)
        return self.status()

    def go_on(self) -> None:
        """Let a run of the app "leased" that pauses go on."""
        Path(self.env["LEASED_APP_GO_ON"]).touch()

    def notes(self) -> list[dict[str, Any]]:
        """Return what clients of the app "leased" have written down."""
        return [json.loads(line) for line in Path(self.env["LEASED_APP_NOTES"]).read_text().splitlines()]


def events(done: Simulation, *names: str) -> list[dict[str, Any]]:
    """Return what the trace says of clients."""
    found = trace.read(done.folder / trace.FILE_NAME)
    return [e for e in found if e["event"] in names and e["client"] != "server"]
