"""Simulations on a host with stub GPUs, and access to the trace of their leases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvml_stub import Host
from shared_servers import SHARED_STATE
from simulations import TIMEOUT_S, Simulation, command

from flower_gpu import trace


@dataclass(frozen=True)
class Running:
    """A simulation that still runs."""

    process: subprocess.Popen[bytes]
    logs: Path
    output: Path

    def ended(self) -> Simulation:
        """Wait for the end of the simulation."""
        status = self.process.wait(TIMEOUT_S)
        folder = max(self.logs.iterdir()) if self.logs.is_dir() else self.logs
        return Simulation(status, self.output.read_text(), folder)


class StubHost:
    """Runs of simulations on a host with stub GPUs."""

    def __init__(self, folder: Path, gpus: int, host: Host | None = None, **fields: Any) -> None:
        self.host = host or Host(folder / "host", gpus=gpus, **fields)
        self.ledger, self.status, self.until = self.host.ledger, self.host.status, self.host.until
        self.folder, self.logs = folder, folder / "runs"
        self.env = {
            **SHARED_STATE,
            "FLOWER_GPU_POLICY": "offer",
            # Clients of the app "leased" take memory of the stub, and write down what they see.
            "PYTHONPATH": str(Path(__file__).parent),
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
        """Start a simulation with results in a folder of this name. It is ended with the block."""
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
        """Let another process of this host hold a lease.

        ``count``: number of GPUs. ``asked``: memory or share of each GPU.
        """
        program = [sys.executable, str(Path(__file__).with_name("lease_user.py"))]
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

    def go_on(self) -> None:
        """Let a paused run of the app "leased" continue."""
        Path(self.env["LEASED_APP_GO_ON"]).touch()

    def notes(self) -> list[dict[str, Any]]:
        """Return the notes of clients of the app "leased"."""
        return [json.loads(line) for line in Path(self.env["LEASED_APP_NOTES"]).read_text().splitlines()]


def events(done: Simulation, *names: str) -> list[dict[str, Any]]:
    """Return the events of clients in the trace."""
    all_events = trace.read(done.folder / trace.FILE_NAME)
    return [e for e in all_events if e["event"] in names and e["client"] != "server"]
