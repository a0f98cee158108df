"""Processes that use the ledger as they are told: one command and one answer per line, in JSON.

They are started as :class:`forked.Forked`.
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
        chosen = [gpu for gpu in usable if gpus is None or gpu.index in gpus]
        return tuple(GPUNeed(gpu.uuid, memory, share, alone) for gpu in chosen)

    needs = []
    if cores is not None:
        needs.append(HostNeed(CORES, cores, cores if least_cores is None else least_cores))
    if host_memory is not None:
        needs.append(HostNeed(MEMORY, host_memory, host_memory))
    if guess is not None:  # of a task that nobody has measured, and of which one such call begins at a time
        needs.append(HostNeed(card_of_task(os.getuid(), 1), guess, guess, capacity=guess))
    return Claimant(options, host_needs=lambda: tuple(needs), **fields)


def lease_of(ticket: Ticket) -> Lease:
    shares = tuple(Share(part.uuid, 0, "", 0, part.memory_bytes, 0) for part in ticket.entry.parts)
    return Lease(ticket.entry.id, shares, ticket=str(ticket.entry.path))


def described(state: State) -> dict[str, Any]:
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
    """Return the files in a folder that this process has open as if to lock them, not just to look."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            path = str(link.readlink())
            can_write = fcntl.fcntl(int(link.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if path.startswith(folder) and (can_write or path.endswith(".mutex")):
                found.append(path)
    return found


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

    def is_asked(self, timeout_s: float) -> bool:
        """Wait until somebody asks for what this process holds."""
        assert self.ticket is not None
        return self.ticket.wait(timeout_s)

    def use(self, gpu: int, nbytes: int, told: bool = True) -> None:
        """Use memory in this process, as a worker with the lease would."""
        assert self.ticket is not None
        allocate(gpu, nbytes)
        if told:
            os.environ[VARIABLE] = lease_of(self.ticket).to_text()
            uuid = self.ticket.entry.parts[0].uuid
            tickets.report({uuid: nbytes})

    def fork_worker(self) -> int:
        """Fork a worker that has the lease, and lives until it is killed."""
        assert self.ticket is not None
        with files.passed_on(self.ticket.descriptor):
            return self._fork()

    def fork_in_thread(self) -> int:
        """Fork something else in another thread, while this one passes its lease on."""
        assert self.ticket is not None
        pids: list[int] = []
        with files.passed_on(self.ticket.descriptor):
            thread = threading.Thread(target=lambda: pids.append(self._fork()))
            thread.start()
            thread.join()
        return pids[0]

    def fork_while_leasing(self, forks: int, memory: int) -> list[str]:
        """Take leases and give them back while another thread forks; return what forks could lock."""
        kept: list[str] = []

        def fork_all() -> None:
            for _ in range(forks):
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.write(write, "\n".join(_locks(str(self.ledger.folder.root))).encode())
                    os._exit(0)
                os.close(write)
                with open(read) as told:
                    kept.extend(told.read().splitlines())
                os.waitpid(pid, 0)

        sys.setswitchinterval(1e-6)
        thread = threading.Thread(target=fork_all)
        thread.start()
        while thread.is_alive():
            self.ledger.release(self.ledger.acquire(claimant(memory=memory)))
        thread.join()
        return kept

    def _fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            for number in (0, 1, 2):
                os.close(number)
            while True:
                time.sleep(60)
        return pid

    def status(self) -> Any:
        return described(self.ledger.status())

    def patience(self, seconds: float) -> None:
        """Wait only so long for NVML."""
        inventory._START_S = inventory._ANSWER_S = seconds

    def pause_after_measuring(self, path: str) -> None:
        """From now on, wait between the question to NVML and the mutex until there is a file."""
        state_module._FRESH_S = 1000.0
        take = Readings.take

        def paused(*entries: Any, **how: Any) -> Any:
            measured = take(*entries, **how)
            Path(f"{path}.measured").touch()
            while not Path(path).exists():
                time.sleep(0.005)
            return measured

        Readings.take = paused  # type: ignore[method-assign]

    def hold_mutex(self) -> None:
        """Take the mutex, and never give it back."""
        self.held = self.ledger.folder.locked()
        self.held.__enter__()

    def short_mutex(self, wait_s: float) -> None:
        self.ledger.folder = LedgerFolder(self.ledger.folder.root, mutex_wait_s=wait_s)

    def few_files(self, left: int) -> None:
        """Let this process open only so many more files."""
        opened = {int(link.name) for link in Path("/proc/self/fd").iterdir()}
        free = (number for number in range(1000) if number not in opened)
        *_, last = (next(free) for _ in range(left + 1))
        resource.setrlimit(resource.RLIMIT_NOFILE, (last, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def attempt(self, what: str, path: str) -> str:
        """Try something with a file, as somebody with bad intentions would; return how that went."""
        actions: dict[str, Callable[[], Any]] = {
            "read": lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
            "write": lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)),
            "remove": lambda: Path(path).unlink(),
            "rename": lambda: Path(path).rename(f"{path}.gone"),
            "add": lambda: Path(path, "1-1-1.ticket").touch(),
            "remove folder": lambda: Path(path).rename(f"{path}-gone"),
        }
        try:
            actions[what]()
        except OSError as error:
            return type(error).__name__
        return "done"

    def clock_jumps(self, seconds: float) -> None:
        """From now on, the time of day is another one here."""
        real = time.time
        time.time = lambda: real() + seconds


def main() -> None:
    user = os.environ.get("CLAIMANT_USER")
    if user:
        inventory.take()  # imports what that account may have no right to read
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    os.umask(0o077)  # what some accounts have
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
