"""Runs commands as a user types them, in a clean shell on hosts with stub GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvml_stub import Host
from run_programs import run_python
from waiting import until

TESTS = Path(__file__).parent
USER = Path(__file__).with_name("lease_user.py")
TIMEOUT_S = 100

COMMAND = """
import os, sys
from flower_gpu.cli import doctor, main
if only := os.environ.pop("ONLY", None):
    checks = doctor.checks
    doctor.checks = lambda: {name: checks()[name] for name in only.split(",")}
code = main.main(sys.argv[1:])
heavy = {"torch", "flwr", "numpy"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


class Shell:
    """The environment of a shell in which only our folders are set, and the processes started from it."""

    def __init__(self, folder: Path) -> None:
        self.ledger = folder / "ledger"
        self.ledger.mkdir()
        self.ledger.chmod(0o1777)
        self.state = folder / "state"
        scripts = str(Path(sys.executable).parent)
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLOWER_GPU", "FLWR_", "CUDA_"))
            and name not in ("LD_LIBRARY_PATH", "COLUMNS", "LINES")
        }
        self.env |= {
            "PATH": f"{scripts}:/usr/bin:/bin",
            "HOME": str(folder),
            "FLOWER_GPU_LEDGER_DIR": str(self.ledger),
            "FLOWER_GPU_STATE_DIR": str(self.state),
            # Fork servers exit soon after the test. They may start slowly on a busy machine, and the notice
            # about this wait must not be in the output of the commands.
            "FLOWER_GPU_SERVER_IDLE_S": "1",
            "FLOWER_GPU_SAY_WAIT_S": os.environ["FLOWER_GPU_SAY_WAIT_S"],
        }
        self._started: list[subprocess.Popen[str]] = []

    def on(self, host: Host) -> Shell:
        """Set the variables of a stub host except for its ledger, and return this shell."""
        self.env |= {**host.env, "FLOWER_GPU_LEDGER_DIR": str(self.ledger)}
        return self

    def __call__(self, command: str, *arguments: str, code: int = 0, **options: Any) -> str:
        """Run a command that prints no error, and return its stdout."""
        done = self.run(command, *arguments, **options)
        assert (done.returncode, done.stderr) == (code, "")
        return done.stdout

    def run(
        self, command: str, *arguments: str, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command until it exits."""
        return run_python(
            COMMAND, command, *arguments, env={**self.env, **(env or {})}, timeout_s=TIMEOUT_S, **options
        )

    def doctor(
        self, *, only: str = "", env: dict[str, str] | None = None, **options: Any
    ) -> list[dict[str, str]]:
        """Return the doctor's findings. ``only`` selects checks, because some are slow to run."""
        done = self.run("doctor", "--json", env={**(env or {}), "ONLY": only}, **options)
        assert done.stderr == ""
        report = json.loads(done.stdout)
        findings: list[dict[str, str]] = report["findings"]
        assert report["ok"] == all(finding["level"] != "problem" for finding in findings)
        assert done.returncode == (0 if report["ok"] else 1)
        assert not [finding for finding in findings if "the check itself failed" in finding["text"]]
        return findings

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a process in a new group. The whole group is killed at the end of the test."""
        env = {**self.env, "PYTHONPATH": str(TESTS), **options.pop("env", {})}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(
            command, env=env, text=True, start_new_session=True, **{**pipes, **options}
        )
        self._started.append(process)
        return process

    def lease(self, label: str, request: str | int, count: int = 1, **options: Any) -> subprocess.Popen[str]:
        """Start a process that requests a lease, and wait until it is about to."""
        process = self.start(sys.executable, str(USER), label, str(count), str(request), **options)
        assert process.stdout is not None
        assert process.stdout.readline() == "asks\n"
        return process

    def holder(self, label: str, request: str | int, count: int = 1, **options: Any) -> subprocess.Popen[str]:
        """Start a process that holds a lease, and wait until the lease is granted."""
        process = self.lease(label, request, count, **options)
        assert process.stdout is not None
        assert process.stdout.readline() == "granted\n"
        return process

    def waiter(self, label: str, request: str | int, count: int = 1) -> subprocess.Popen[str]:
        """Start a process that waits for a lease, and wait until its ticket exists."""
        tickets_before = self.tickets()
        process = self.lease(label, request, count)
        until(lambda: self.tickets() > tickets_before)
        return process

    def tickets(self) -> int:
        """Return the number of tickets in the ledger."""
        return sum(1 for _ in self.ledger.glob("*/*.ticket"))

    def end(self) -> None:
        """Kill all processes that were started, with their groups."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
