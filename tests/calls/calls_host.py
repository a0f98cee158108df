"""A host with stub GPUs, and client processes on it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nvml_stub
from forked import WAIT_S, Forked
from nvml_stub import GIB
from phases import PHASES

FOLDER = Path(__file__).parent

#: A forked worker inherits the state of its caller. A worker of a fork server receives all that it needs.
METHODS = ["fork", "forkserver"]


class CallError(Exception):
    """A call failed in its process."""

    def __init__(self, names: list[str], chain: list[list[str]]) -> None:
        super().__init__(": ".join(chain[0]))
        self.names = names
        self.name, self.text = chain[0]
        self.causes = chain[1:]


class Caller(Forked):
    """A client process."""

    def __init__(self, env: dict[str, str]) -> None:
        super().__init__(FOLDER / "calls_caller.py", env)

    def send(self, command: str, *arguments: Any, **options: Any) -> None:
        """Send a command without waiting. :meth:`answer` returns the result."""
        self.write(json.dumps([command, arguments, options]))

    def answer(self) -> Any:
        """Wait for the answer to the last command. Raises CallError if it failed."""
        return value_of(json.loads(self.read()))

    def __call__(self, command: str, *arguments: Any, **options: Any) -> Any:
        self.send(command, *arguments, **options)
        return self.answer()

    def follow(self, *steps: list[Any], **options: Any) -> Any:
        """Run a call with these steps."""
        return self("follow", steps, **options)

    def fails(self, command: str, *arguments: Any, **options: Any) -> CallError:
        """Send a command that must fail, and return its error."""
        self.send(command, *arguments, **options)
        return self.failure()

    def failure(self) -> CallError:
        """Wait for the error of the last command."""
        try:
            value = self.answer()
        except CallError as error:
            return error
        raise AssertionError(f"the command did not fail, it returned {value}")

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().close()


def value_of(reply: dict[str, Any]) -> Any:
    """Return the value in a reply, or raise its error."""
    if "error" in reply:
        raise CallError(reply["error"], reply["chain"])
    return reply["value"]


class CallsHost:
    """A host with a ledger, footprints and a trace.

    Parameters
    ----------
    folder : Path
        Folder of this test.
    state : Path
        The user's state folder, which all tests share.
    """

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self.stub = nvml_stub.Host(folder / "stub", gpus=1)
        self.uuid = self.stub.uuids[0]
        self.ledger = self.stub.ledger
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.run_dir.chmod(0o777)
        for file in state.rglob("footprints*"):
            file.unlink()
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLOWER_GPU", "CUDA_", "PYTORCH_", "LD_", "XLA_", "OMP_"))
        }
        self.env |= {
            **self.stub.env,
            "FLOWER_GPU_STATE_DIR": str(state),
            "FLOWER_GPU_RUN_DIR": str(self.run_dir),
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "LIGHT_SERVERS": "1",
        }
        self._started: list[Caller] = []
        self._pids: list[int] = []

    def add_gpu(self) -> str:
        """Add a second GPU to the host, and return its UUID."""
        host = nvml_stub.Host(self.folder / "stub", gpus=2)
        return host.uuids[1]

    def start(self, **env: str) -> Caller:
        """Start a client process."""
        caller = Caller({**self.env, **env})
        self._started.append(caller)
        caller.answer()
        return caller

    def status(self) -> Any:
        """Return the holders and waiting claims of the ledger."""
        state = self.stub.status()
        holders = [
            {
                "pid": entry.pid,
                "user": entry.user,
                "label": entry.label(),
                "alone": any(part.alone for part in entry.gpu_parts),
                "parts": {part.uuid: part.memory_bytes for part in entry.gpu_parts},
                "used": entry.reported()[1],
            }
            for entry in state.holders
        ]
        return {"holders": holders, "waiting": [entry.label() for entry in state.waiting]}

    def holders(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.status()["holders"]
        return entries

    def until(self, condition: Callable[[Any], bool]) -> Any:
        """Wait until the status of the ledger meets the condition, and return the status."""
        deadline = time.monotonic() + WAIT_S
        while not condition(state := self.status()):
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
        return state

    def until_free(self) -> None:
        self.until(lambda state: not state["holders"])

    def until_waiting(self, caller: Caller) -> None:
        """Wait until a claim waits in the queue. Fails with the error of the caller if its call fails."""
        self.until(lambda state: state["waiting"] or caller.has_answer())
        assert not caller.has_answer(), caller.answer()

    def wait_until_reached(self, name: str) -> int:
        """Wait until a task announces that it has reached this step, and return its pid."""
        path = self.folder / name
        deadline = time.monotonic() + WAIT_S
        while not path.exists():
            assert time.monotonic() < deadline, f"no task has reached {name}"
            time.sleep(0.01)
        pid = int(path.read_text())
        self._pids.append(pid)
        return pid

    def announce(self, name: str) -> list[Any]:
        """Return a step that announces itself to :meth:`wait_until_reached`."""
        return ["announce", str(self.folder / name)]

    def wait(self, name: str) -> list[Any]:
        """Return a step that waits for :meth:`go`."""
        return ["wait", str(self.folder / name)]

    def go(self, name: str) -> None:
        (self.folder / name).touch()

    def trace(self, *kinds: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of these kinds with these fields in the trace. By default, return all events."""
        path = self.run_dir / "trace.jsonl"
        all_events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [
            event
            for event in all_events
            if (not kinds or event["event"] in kinds) and fields.items() <= event.items()
        ]

    def events(self, **fields: Any) -> list[str]:
        """Return the names of all events except for phases of workers and leases of cores."""
        names = [event["event"] for event in self.trace(**fields) if event["event"] not in PHASES]
        return [name for name in names if not name.startswith("cores_")]

    def granted(self) -> list[float]:
        """Return the sizes in GiB of all leases granted until now. A lease of a whole GPU counts as 0."""
        return [
            0.0
            if event["alone"] and event["gpus"][0]["memory_bytes"] > 15 * GIB
            else round(event["gpus"][0]["memory_bytes"] / GIB, 2)
            for event in self.trace("lease_granted")
        ]

    def close(self) -> None:
        for caller in self._started:
            caller.close()
        for pid in self._pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Return True if a process has ended or is exiting.

    The kernel closes files, and so releases their locks, shortly before it marks a process as dead.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    exiting = 0x4  # include/linux/sched.h: PF_EXITING
    return fields[0] in "ZX" or bool(int(fields[6]) & exiting)
