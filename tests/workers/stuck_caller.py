"""Calls with workers that get stuck on a disk that hangs. ``hung_disk.py`` runs this program.

It prints a line of JSON after each step. At the end it waits until all workers have ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import light_servers

from flower_gpu import run_in_worker, unkillable
from flower_gpu.errors import WorkerError
from flower_gpu.leases.ledger import Ledger
from flower_gpu.workers import caller
from flower_gpu.workers.call import Call
from flower_gpu.workers.life import children

STAT = "left_tasks:look_at"


def report(step: str, **fields: Any) -> None:
    """Print the result of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


def holders() -> list[str]:
    """Return the labels of all leases."""
    return [entry.label() for entry in Ledger().status().holders]


def ended(pid: int) -> bool:
    """Return True if there is no such process."""
    return not Path(f"/proc/{pid}").exists()


def is_stuck(pid_file: Path) -> bool:
    """Return True if the process with the id in a file is in state D."""
    if not pid_file.exists() or not pid_file.read_text():
        return False
    stat = Path(f"/proc/{pid_file.read_text()}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "D"


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():
        time.sleep(0.02)


def stuck_programs(disk: str, abandoned: list[str]) -> None:
    """Run programs that get stuck, and note which of them were abandoned."""
    command = [sys.executable, "-c", "import os, sys; os.stat(sys.argv[1])", f"{disk}/program"]
    try:
        unkillable.run(command, timeout_s=0.5)
    except subprocess.TimeoutExpired:
        abandoned.append("run")
    if not unkillable.end_group(subprocess.Popen(command, process_group=0), 0.5):
        abandoned.append("end_group")


def main(disk: str, method: str, scratch: str) -> None:
    """Let three workers get stuck. The calls are timed out, interrupted and cancelled, respectively."""
    light_servers.begin()
    pids = [Path(scratch) / name for name in ("late", "interrupted", "cancelled")]
    call: dict[str, Any] = {"gpu": "never", "start_method": method}
    abandoned: list[str] = []
    programs = threading.Thread(target=stuck_programs, args=(disk, abandoned))
    programs.start()

    try:
        run_in_worker(STAT, disk, str(pids[0]), timeout_s=3, **call)
    except WorkerError as error:
        report("late", kind=type(error).__name__, text=str(error), pid=int(pids[0].read_text()))
    report("leased", holders=holders())
    report("goes on", value=run_in_worker("plain_tasks:square", 6, **call))

    def interrupt() -> None:
        until(lambda: is_stuck(pids[1]))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        run_in_worker(STAT, disk, str(pids[1]), **call)
    except KeyboardInterrupt:
        report("interrupted")

    line = caller.Line()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            line.run(Call(STAT, (disk, str(pids[2]))), method)
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: is_stuck(pids[2]))
    line.cancel()
    thread.join()
    programs.join()
    report("programs", abandoned=abandoned)
    report("cancelled", kind=type(errors[0]).__name__)
    line.close()

    until(lambda: all(ended(int(path.read_text())) for path in pids))
    until(lambda: not holders())
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "flower-gpu-leaving"])
    report("gone", workers=[pid for pid in children() if str(pid) in map(Path.read_text, pids)])


if __name__ == "__main__":
    main(*sys.argv[1:])
