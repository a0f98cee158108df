"""Tasks that put processes into sessions of their own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def leave(folder: str, end: str) -> list[bool]:
    """Start some, each of which leaves a file with its pid; tell whether they live while this worker does."""
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


def _daemon(folder: Path) -> None:
    """Fork twice, as daemons do; the last one has a child in yet another session."""
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
