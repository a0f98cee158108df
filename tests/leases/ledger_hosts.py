"""Stub hosts with a ledger, and processes that use the ledger."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from forked import TESTS as TESTS
from forked import WAIT_S, Forked
from nvml_stub import GIB, Host
from waiting import until


class RefusedError(Exception):
    """A command failed; ``kind`` is the name of the error's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Claimant(Forked):
    """A process that uses the ledger on command."""

    def __init__(self, env: dict[str, str]) -> None:
        super().__init__(Path(__file__).with_name("claimant.py"), env)

    def send(self, command: str, **fields: Any) -> None:
        """Send a command without waiting. :meth:`answer` returns the result."""
        self.write(json.dumps([command, fields]))

    def answer(self) -> Any:
        """Wait for the answer to the last command. Raises RefusedError if the command failed."""
        reply = json.loads(self.read())
        if "error" in reply:
            raise RefusedError(reply["error"], reply["message"])
        return reply["answer"]

    def __call__(self, command: str, **fields: Any) -> Any:
        self.send(command, **fields)
        return self.answer()


class LedgerHost:
    """A host whose GPUs have 16 GiB for leases each, and its processes."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.stub = Host(folder / "host", gpus=gpus, total=17 * GIB)
        self.root, self.env = self.stub.ledger, self.stub.env
        self._started: list[Claimant] = []
        self._pids: list[int] = []
        self._observer: Claimant | None = None

    @property
    def account_folder(self) -> Path:
        """The ledger folder of this account."""
        return self.root / f"flower-gpu-leases-{os.getuid()}"

    def start(self, count: int, **env: str) -> list[Claimant]:
        """Start processes in parallel and wait until each is ready."""
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
        """Return the state of the ledger, as read by a separate process that takes the mutex."""
        if self._observer is None:
            [self._observer] = self.start(1)
        return self._observer("status")

    def until(self, condition: Callable[[Any], bool]) -> Any:
        """Wait until the state of the ledger meets the condition, and return the state."""

        def matching_state() -> Any:
            state = self.status()
            return state if condition(state) else None

        return until(matching_state, timeout_s=WAIT_S)

    def line_up(self, *claims: tuple[Claimant, dict[str, Any]]) -> None:
        """Make claimants wait for their claims in this order."""
        for claimant, fields in claims:
            claimant.send("acquire", **fields)
            self.until(lambda state, pid=claimant.pid: pid in state["waiting"])

    def kill_on_close(self, pid: int) -> None:
        """Also kill this process, which a claimant has started, when the host is closed."""
        self._pids.append(pid)

    def close(self) -> None:
        for claimant in self._started:
            claimant.close()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
