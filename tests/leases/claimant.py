"""Processes that use the ledger on command: each line on stdin is a command and each line on stdout a reply.

Both are JSON. :class:`forked.Forked` starts the processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked import serve
from nvml_stub import allocate

from flower_gpu import files
from flower_gpu.errors import GPUError
from flower_gpu.gpu import inventory
from flower_gpu.leases import state as state_module
from flower_gpu.leases import tickets
from flower_gpu.leases.admission import CORES, MEMORY, GPUNeed, HostNeed, card_of_task
from flower_gpu.leases.lease import VARIABLE, Lease, Share
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.state import Readings, State
from flower_gpu.leases.tickets import Ticket

RESERVE_BYTES = 1 << 30


def claimant(
    memory: int | None = None,
    share: float | None = None,
    gpus: list[int] | None = None,
    alone: bool = False,
    cores: int | None = None,
    least_cores: int | None = None,
    host_memory: int | None = None,
    guess: int | None = None,
    **fields: Any,
) -> Claimant:
    def options(usable: Any) -> tuple[GPUNeed, ...]:
        allowed = [gpu for gpu in usable if gpus is None or gpu.index in gpus]
        return tuple(GPUNeed(gpu.uuid, memory, share, alone) for gpu in allowed)

    needs = []
    if cores is not None:
        needs.append(HostNeed(CORES, cores, cores if least_cores is None else least_cores))
    if host_memory is not None:
        needs.append(HostNeed(MEMORY, host_memory, host_memory))
    # The need of a task without a measured footprint. Its capacity admits one such call at a time.
    if guess is not None:
        needs.append(HostNeed(card_of_task(os.getuid(), 1), guess, guess, capacity=guess))
    return Claimant(options, host_needs=lambda: tuple(needs), **fields)


def lease_of(ticket: Ticket) -> Lease:
    shares = tuple(Share(part.uuid, 0, "", 0, part.memory_bytes, 0) for part in ticket.entry.parts)
    return Lease(ticket.entry.id, shares, ticket=str(ticket.entry.path))


def describe_state(state: State) -> dict[str, Any]:
    granted = state.granted()
    return {
        "cards": {card.uuid: card.capacity_bytes for card in state.cards},
        "leased": {card.uuid: state.leased_bytes(card.uuid) for card in state.cards},
        "host": {card.uuid: [state.leased_bytes(card.uuid), card.capacity_bytes] for card in state.host},
        "holders": [entry.pid for entry in state.holders],
        "waiting": [entry.pid for entry in state.waiting],
        "ready": [entry.pid for entry in state.waiting if entry.id in granted],
        "labels": {str(entry.pid): entry.label() for entry in (*state.holders, *state.waiting)},
        "users": sorted({entry.user for entry in (*state.holders, *state.waiting)}),
        "ids": [entry.id for entry in (*state.holders, *state.waiting)],
    }


def _locks(folder: str) -> list[str]:
    """Return the files in a folder that this process has open in a mode for locking."""
    lockable = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            path = str(link.readlink())
            can_write = fcntl.fcntl(int(link.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if path.startswith(folder) and (can_write or path.endswith(".mutex")):
                lockable.append(path)
    return lockable


class Commands:
    def __init__(self) -> None:
        self.ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        self.ticket: Ticket | None = None

    def acquire(self, timeout_s: float | None = None, **fields: Any) -> Any:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.ticket = self.ledger.acquire(claimant(**fields), deadline=deadline)
        return {part.uuid: part.memory_bytes for part in self.ticket.entry.parts}

    def release(self) -> None:
        assert self.ticket is not None
        self.ledger.release(self.ticket)

    def is_requested(self, timeout_s: float) -> bool:
        """Return True if another claim asks for the lease of this process within ``timeout_s`` seconds."""
        assert self.ticket is not None
        return self.ticket.wait(timeout_s)

    def use(self, gpu: int, nbytes: int, is_reported: bool = True) -> None:
        """Use GPU memory in this process, as a worker with the lease would, and report it by default."""
        assert self.ticket is not None
        allocate(gpu, nbytes)
        if is_reported:
            os.environ[VARIABLE] = lease_of(self.ticket).to_text()
            uuid = self.ticket.entry.parts[0].uuid
            tickets.report({uuid: nbytes})

    def fork_worker(self) -> int:
        """Fork a worker that shares the lease and lives until it is killed. Return its pid."""
        assert self.ticket is not None
        with files.passed_on(self.ticket.descriptor):
            return self._fork()

    def fork_in_thread(self) -> int:
        """Fork an unrelated process in another thread while this thread passes its lease on."""
        assert self.ticket is not None
        pids: list[int] = []
        with files.passed_on(self.ticket.descriptor):
            thread = threading.Thread(target=lambda: pids.append(self._fork()))
            thread.start()
            thread.join()
        return pids[0]

    def fork_while_leasing(self, forks: int, memory: int) -> list[str]:
        """Acquire and release leases while another thread forks. Return the files that forks could lock."""
        lockable: list[str] = []

        def fork_all() -> None:
            for _ in range(forks):
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.write(write, "\n".join(_locks(str(self.ledger.folder.root))).encode())
                    os._exit(0)
                os.close(write)
                with open(read) as report:
                    lockable.extend(report.read().splitlines())
                os.waitpid(pid, 0)

        sys.setswitchinterval(1e-6)
        thread = threading.Thread(target=fork_all)
        thread.start()
        while thread.is_alive():
            self.ledger.release(self.ledger.acquire(claimant(memory=memory)))
        thread.join()
        return lockable

    def _fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            for number in (0, 1, 2):
                os.close(number)
            while True:
                time.sleep(60)
        return pid

    def status(self) -> Any:
        return describe_state(self.ledger.status())

    def set_nvml_timeout(self, seconds: float) -> None:
        """Wait at most this long for an answer of NVML."""
        inventory._START_S = inventory._ANSWER_S = seconds

    def pause_after_measuring(self, path: str) -> None:
        """Pause each later claim between its query of NVML and the mutex until the file ``path`` exists."""
        state_module._FRESH_S = 1000.0
        take = Readings.take

        def paused(*entries: Any, **options: Any) -> Any:
            measured = take(*entries, **options)
            Path(f"{path}.measured").touch()
            while not Path(path).exists():
                time.sleep(0.005)
            return measured

        Readings.take = paused  # type: ignore[method-assign]

    def hold_mutex(self) -> None:
        """Take the mutex and never release it."""
        self.mutex = self.ledger.folder.locked()
        self.mutex.__enter__()

    def set_mutex_wait(self, wait_s: float) -> None:
        self.ledger.folder = LedgerFolder(self.ledger.folder.root, mutex_wait_s=wait_s)

    def limit_open_files(self, remaining: int) -> None:
        """Limit the number of files that this process can still open to ``left``."""
        open_numbers = {int(link.name) for link in Path("/proc/self/fd").iterdir()}
        free = (number for number in range(1000) if number not in open_numbers)
        *_, limit = (next(free) for _ in range(remaining + 1))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def attempt(self, action: str, path: str) -> str:
        """Try a hostile action on a file. Return "done" or the name of the error."""
        actions: dict[str, Callable[[], Any]] = {
            "read": lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
            "write": lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)),
            "remove": lambda: Path(path).unlink(),
            "rename": lambda: Path(path).rename(f"{path}.gone"),
            "add": lambda: Path(path, "1-1-1.ticket").touch(),
            "remove folder": lambda: Path(path).rename(f"{path}-gone"),
        }
        try:
            actions[action]()
        except OSError as error:
            return type(error).__name__
        return "done"

    def shift_clock(self, seconds: float) -> None:
        """Shift the time of day of this process by ``seconds``."""
        real = time.time
        time.time = lambda: real() + seconds


def main() -> None:
    user = os.environ.get("CLAIMANT_USER")
    if user:
        # Take an inventory before the change of account, because that account may not be allowed to read the
        # modules that it imports.
        inventory.take()
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    # Some accounts have this umask.
    os.umask(0o077)
    try:
        commands = Commands()
    except GPUError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        sys.stdin.read()
        return
    print(json.dumps({"answer": os.getpid()}), flush=True)
    for line in sys.stdin:
        name, fields = json.loads(line)
        try:
            answer = {"answer": getattr(commands, name)(**fields)}
        except GPUError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(main)
