"""Tasks that start processes in their own sessions."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import light_servers

from flower_gpu import run_in_worker
from flower_gpu.workers.forkserver import control


def leave(folder: str, end: str) -> list[bool]:
    """Start processes that write their pids to files. Return for each True if it left this session."""
    for number in range(2):
        subprocess.Popen(["sh", "-c", f"echo $$ > {folder}/shell{number}; sleep 600"], start_new_session=True)
    _daemon(Path(folder))
    names = ("shell0", "shell1", "daemon", "child")
    while not all((Path(folder) / name).exists() and (Path(folder) / name).read_text() for name in names):
        time.sleep(0.01)
    time.sleep(0.3)
    pids = [int((Path(folder) / name).read_text()) for name in names]
    living = [os.getsid(pid) != os.getsid(0) for pid in pids]
    if end == "abort":
        os.abort()
    while end == "hang":
        time.sleep(1)
    return living


def start_server(kind: str) -> int:
    """Start another kind of fork server than this worker's, and return its pid."""
    light_servers.begin()
    os.environ["LC_OF_ANOTHER_SERVER"] = kind
    before = {status.pid for status in control.status()}
    run_in_worker("os:getpid", start_method="forkserver")
    (new,) = {status.pid for status in control.status()} - before
    return new


def _daemon(folder: Path) -> None:
    """Fork twice, as daemons do. The daemon has a child in yet another session."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    (folder / "daemon").write_text(str(os.getpid()))
    if os.fork() == 0:
        os.setsid()
        (folder / "child").write_text(str(os.getpid()))
    time.sleep(600)
    os._exit(0)
