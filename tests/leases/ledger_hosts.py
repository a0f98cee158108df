"""Stub hosts with a ledger, and processes that use it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import GIB, Host
from waiting import until

TESTS = Path(__file__).parents[1]
WAIT_S = 60  # for what should take an instant; the machine may be busy


class RefusedError(Exception):
    """A command failed; ``kind`` is the name of the error's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@cache
def forks() -> socket.socket:
    """Start what claimants are forked from; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).with_name("claimant.py"))]
    subprocess.Popen(command, stdin=theirs, env={**os.environ, "PYTHONPATH": str(TESTS)})
    theirs.close()
    return ours


class Claimant:
    """A process that uses the ledger as it is told."""

    def __init__(self, env: dict[str, str]) -> None:
        self._left = b""
        stdin, self._commands = os.pipe()
        self._answers, stdout = os.pipe()
        socket.send_fds(forks(), [json.dumps({**os.environ, **env}).encode()], [stdin, stdout])
        self.pid = int(forks().recv(100))
        self._process = os.pidfd_open(self.pid)  # its number may be another one's when it is gone
        os.close(stdin)
        os.close(stdout)

    def tell(self, command: str, **fields: Any) -> None:
        """Send a command; its answer is to be asked for."""
        os.write(self._commands, json.dumps([command, fields]).encode() + b"\n")

    def answer(self) -> Any:
        """Wait for the answer to the command that was sent."""
        deadline = time.monotonic() + WAIT_S
        while b"\n" not in self._left:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            data = os.read(self._answers, 65536) if ready else b""
            if not data:
                raise AssertionError("it ended" if ready else "no answer")
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise RefusedError(reply["error"], reply["message"])
        return reply["answer"]

    def __call__(self, command: str, **fields: Any) -> Any:
        self.tell(command, **fields)
        return self.answer()

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        select.select([self._process], [], [], WAIT_S)

    def close(self) -> None:
        self.kill()
        for descriptor in (self._process, self._commands, self._answers):
            os.close(descriptor)


class LedgerHost:
    """A host of GPUs with 16 GiB for leases each, and the processes on it."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.stub = Host(folder / "host", gpus=gpus, total=17 * GIB)
        self.root = folder / "ledger"
        self.root.mkdir()
        self.root.chmod(0o1777)
        self.env = {**self.stub.env, "FLOWER_GPU_LEDGER_DIR": str(self.root)}
        self.env["STUB_FILE"] = str(self.stub.stub_file)
        self._started: list[Claimant] = []
        self._pids: list[int] = []
        self._observer: Claimant | None = None

    @property
    def own(self) -> Path:
        """The ledger folder of this account."""
        return self.root / f"flower-gpu-leases-{os.getuid()}"

    def start(self, count: int, **env: str) -> list[Claimant]:
        """Start processes, side by side."""
        started = [Claimant({**self.env, **env}) for _ in range(count)]
        self._started += started
        for claimant in started:
            assert claimant.answer() == claimant.pid
        return started

    def start_refused(self, **env: str) -> RefusedError:
        claimant = Claimant({**self.env, **env})
        self._started.append(claimant)
        with pytest.raises(RefusedError) as refused:
            claimant.answer()
        return refused.value

    def status(self) -> Any:
        """What the ledger says, to a process of its own that takes the mutex."""
        if self._observer is None:
            [self._observer] = self.start(1)
        return self._observer("status")

    def until(self, condition: Callable[[Any], bool]) -> Any:
        """Wait until the ledger says something."""

        def look() -> Any:
            state = self.status()
            return state if condition(state) else None

        return until(look, timeout_s=WAIT_S)

    def line_up(self, *claims: tuple[Claimant, dict[str, Any]]) -> None:
        """Have these wait, in this order."""
        for claimant, fields in claims:
            claimant.tell("acquire", **fields)
            self.until(lambda state, pid=claimant.pid: pid in state["waiting"])

    def also_end(self, pid: int) -> None:
        """End a process, too, that one of these has started."""
        self._pids.append(pid)

    def close(self) -> None:
        for claimant in self._started:
            claimant.close()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
