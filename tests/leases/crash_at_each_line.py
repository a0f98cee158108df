"""Kill a process at each line of an acquire and a release, and see what the next one finds.

Prints as JSON how many lines there were, and what went wrong.
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


def end_at(line: int, action: Callable[[], None]) -> None:
    """Run an action in this process, killed at its n-th line, and end."""
    kill_at_line(line)
    action()
    os._exit(0)


def was_killed(pid: int) -> bool:
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def take(line: int) -> int:
    """Fork a process that takes and gives back, and is killed at a line of that."""
    pid = os.fork()
    if pid == 0:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        end_at(line, lambda: ledger.release(ledger.acquire(claimant(memory=10 * GIB))))
    return pid


def hold(line: int, go: int) -> int:
    """Fork a process that holds a lease until it can read from ``go``, and is killed at a line of release."""
    pid = os.fork()
    if pid == 0:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        ticket = ledger.acquire(claimant(memory=10 * GIB))
        os.read(go, 1)
        end_at(line, lambda: ledger.release(ticket))
    return pid


def wait(granted: int, line: int | None = None) -> int:
    """Fork a process that waits in line, and writes a byte to ``granted``; or is killed while it waits."""
    pid = os.fork()
    if pid == 0:
        ledger = Ledger(reserve_bytes=RESERVE_BYTES)
        if line is not None:
            end_at(line, lambda: ledger.release(ledger.acquire(claimant(memory=10 * GIB))))
        ticket = ledger.acquire(claimant(memory=10 * GIB))
        os.write(granted, b"1")
        ledger.release(ticket)
        os._exit(0)
    return pid


def check_next(ledger: Ledger, where: str) -> list[str]:
    """Look as the next one would; return what is wrong."""
    problems = []
    state = ledger.status()
    if state.holders or state.waiting:
        problems.append(f"{where}: {state}")
    ledger.release(ledger.acquire(claimant(memory=16 * GIB), deadline=0))
    if left := sorted(path.name for path in ledger.folder.own().iterdir()):
        problems.append(f"{where}: {left} are left")
    return problems


def main() -> None:
    problems: list[str] = []
    ledger = Ledger(reserve_bytes=RESERVE_BYTES)
    line = 0
    while was_killed(take(line)):
        problems += check_next(ledger, f"line {line}")
        line += 1
    waiting = 0
    go_read, go = os.pipe()
    read, granted = os.pipe()
    for at in range(0, line, 70):
        # A holder that is killed while it gives back, one that is killed while it waits or gets on, and one
        # that is to get on in spite of both.
        holder = hold(at, go_read)
        while not ledger.status().holders:
            time.sleep(0.001)
        victim = wait(granted, line=at + 100)
        while not any(entry.pid == victim for entry in ledger.status().waiting):
            if os.waitpid(victim, os.WNOHANG)[0]:
                victim = 0
                break
        waiter = wait(granted)
        while not any(entry.pid == waiter for entry in ledger.status().waiting):
            time.sleep(0.001)
        os.write(go, b"1")
        if not readable([read], 30):
            problems.append(f"line {at}: the one that waits got nothing")
            os.kill(waiter, signal.SIGKILL)
        else:
            os.read(read, 1)
        for pid in filter(None, (holder, victim, waiter)):
            os.waitpid(pid, 0)
        problems += check_next(ledger, f"line {at} with others")
        waiting += 1
    print(json.dumps({"lines": line, "waiting": waiting, "problems": problems}))


if __name__ == "__main__":
    main()
