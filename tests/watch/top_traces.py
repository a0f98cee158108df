"""Traces of invented runs, for the tests of code that follows traces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_shell import Shell

from flower_gpu import trace
from flower_gpu.apps.recording import registered
from flower_gpu.trace import VERSION

GPU_UUID = "GPU-1"


class Trace:
    """A trace that is being written. Its clock advances by a second with each event."""

    def __init__(self, folder: Path, began: float = 1000.0) -> None:
        self.path = folder / trace.FILE_NAME
        self.time = began
        # Host of a Ray cluster that writes the next lines.
        self.host = ""

    def line(self, event: str, **fields: Any) -> str:
        self.time += 1
        host_field = {"host": self.host} if self.host else {}
        return json.dumps({"v": VERSION, "time": self.time, "event": event, **host_field, **fields}) + "\n"

    def join(self, host: str, gpus: int = 0, **more: Any) -> None:
        """Write that a host joins the run. The next lines belong to this host."""
        self.host = host
        gpu_fields = [
            {"uuid": f"{host}-{number}", "index": number, "name": "NVIDIA Stub 16GB", "total_bytes": 2**34}
            for number in range(gpus)
        ]
        fields = {"host_id": f"id of {host}", "concurrency": 4, "cores": 8, "gpus": gpu_fields, **more}
        self.write("host_joined", **fields)

    def lose(self, host: str, **more: Any) -> None:
        """Write that the driver has lost a host. The next lines belong to the driver."""
        self.host = ""
        self.write("host_lost", host=host, **{"host_id": f"id of {host}", "reason": "its agent died", **more})

    def write(self, event: str, **fields: Any) -> None:
        self.write_text(self.line(event, **fields))

    def write_text(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def worker(self, call: str, outcome: str | None = None, pid: int = 1, **fields: Any) -> None:
        """Write the start of a worker, and also its end if an outcome is given."""
        fields = {"call": call, "client": "3", "task": "fit", "round": 1, "pid": pid, **fields}
        self.write("worker_started", **fields, start_method="forkserver")
        if outcome is not None:
            self.write("worker_finished", **fields, start_method="forkserver", outcome=outcome)

    def call(self, number: int, pid: int = 1, uuid: str = GPU_UUID, **more: Any) -> Iterator[str]:
        """Yield the lines of a call with a lease, from its request to its release."""
        call = f"c{number}"
        call_fields = {"call": call, "client": str(number % 100), "task": "fit", "round": 1 + number // 1000}
        call_fields |= more
        lease = f"l{number}"
        worker = {**call_fields, "pid": pid, "start_method": "forkserver", "lease": lease}
        gpus = [{"uuid": uuid, "index": 0, "name": "NVIDIA Stub 16GB", "memory_bytes": 2**32}]
        yield self.line("lease_requested", **call_fields, caller_pid=7, count=1, memory_bytes=2**32)
        yield self.line("lease_granted", **call_fields, lease=lease, gpus=gpus, alone=False, waited_s=0.5)
        yield self.line("worker_started", **worker)
        yield self.line("task_started", call=call_fields["call"], pid=pid, client=call_fields["client"])
        yield self.line("progress", call=call_fields["call"], pid=pid, desc="epoch 1", n=1, total=2)
        yield self.line("gpu_sample", gpus=[{"uuid": uuid, "used_bytes": number}])
        yield self.line("worker_finished", **worker, outcome="ok", error=None, seconds=1.0)
        yield self.line("lease_released", **call_fields, lease=lease, held_s=2.0)


@contextmanager
def run_of(shell: Shell, folder: Path, name: str = "quickstart", kind: str = "launch") -> Iterator[Trace]:
    """Register a run in the state folder of the shell's commands while the context is open."""
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWER_GPU_STATE_DIR", str(shell.state))
        with registered(folder, kind, name):
            patch.undo()
            yield Trace(folder, time.time())
