"""Kill a process at each line of an acquire and a release, and check the ledger as the next process sees it.

Prints the number of lines and the problems as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

from claimant import RESERVE_BYTES, claimant
from kill_at_line import kill_at_line
from nvml_stub import GIB

from flower_gpu.leases.ledger import Ledger
from flower_gpu.polling import readable


def run_and_kill_at(line: int, action: Callable[[], None]) -> None:
    """Run an action in this process and exit. The process is killed at the given line of the action."""
    kill_at_line(line)
    action()
    os._exit(0)


def was_killed(pid: int) -> bool:
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def fork_acquirer(line: int) -> int:
    """Fork a process that acquires and releases a lease, and is killed at this line of the two calls."""
    pid = os.fork()
    if pid == 0:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        run_and_kill_at(line, lambda: ledger.release(ledger.acquire(claimant(memory=10 * GIB))))
    return pid


def fork_holder(line: int, go: int) -> int:
    """Fork a process that holds a lease until ``go`` is readable, and is killed at this line of release."""
    pid = os.fork()
    if pid == 0:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        ticket = ledger.acquire(claimant(memory=10 * GIB))
        os.read(go, 1)
        run_and_kill_at(line, lambda: ledger.release(ticket))
    return pid


def fork_waiter(granted: int, line: int | None = None) -> int:
    """Fork a process that waits for a lease and then writes a byte to ``granted``.

    With a line, the process is killed at that line of its acquire and release instead.
    """
    pid = os.fork()
    if pid == 0:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        if line is not None:
            run_and_kill_at(line, lambda: ledger.release(ledger.acquire(claimant(memory=10 * GIB))))
        ticket = ledger.acquire(claimant(memory=10 * GIB))
        os.write(granted, b"1")
        ledger.release(ticket)
        os._exit(0)
    return pid


def find_problems(ledger: Ledger, situation: str) -> list[str]:
    """Read the ledger and acquire a lease, as the next process would. Return the problems."""
    problems = []
    state = ledger.status()
    if state.holders or state.waiting:
        problems.append(f"{situation}: {state}")
    ledger.release(ledger.acquire(claimant(memory=16 * GIB), deadline=0))
    if leftovers := sorted(path.name for path in ledger.folder.own_folder().iterdir()):
        problems.append(f"{situation}: {leftovers} are left")
    return problems


def main() -> None:
    problems: list[str] = []
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    line = 0
    while was_killed(fork_acquirer(line)):
        problems += find_problems(ledger, f"line {line}")
        line += 1
    rounds = 0
    go_read, go = os.pipe()
    read, granted = os.pipe()
    for kill_line in range(0, line, 70):
        # The holder is killed while it releases its lease, and the victim while it waits or acquires. The
        # waiter must get its lease in spite of both.
        holder = fork_holder(kill_line, go_read)
        while not ledger.status().holders:
            time.sleep(0.001)
        victim = fork_waiter(granted, line=kill_line + 100)
        while not any(entry.pid == victim for entry in ledger.status().waiting):
            if os.waitpid(victim, os.WNOHANG)[0]:
                victim = 0
                break
        waiter = fork_waiter(granted)
        while not any(entry.pid == waiter for entry in ledger.status().waiting):
            time.sleep(0.001)
        os.write(go, b"1")
        if not readable([read], 30):
            problems.append(f"line {kill_line}: the waiter got no lease")
            os.kill(waiter, signal.SIGKILL)
        else:
            os.read(read, 1)
        for pid in filter(None, (holder, victim, waiter)):
            os.waitpid(pid, 0)
        problems += find_problems(ledger, f"line {kill_line} with others")
        rounds += 1
    print(json.dumps({"lines": line, "waiting": rounds, "problems": problems}))


if __name__ == "__main__":
    main()
