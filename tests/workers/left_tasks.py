"""Tasks that start processes, create sockets or get stuck, so their workers could leave something behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
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


@contextmanager
def _opened() -> Iterator[None]:
    """Run a Listener, a Manager, a process that shares descriptors, and multiprocessing's fork server."""
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    child.start()
    receiving, sending = multiprocessing.Pipe()
    sharing = multiprocessing.get_context("fork").Process(target=_share, args=(sending,))
    sharing.start()
    with Listener(), multiprocessing.get_context("spawn").Manager() as manager, receiving.recv():
        manager.dict()
        yield
    for process in (child, sharing):
        process.kill()
        process.join()


def _share(connection: Connection) -> None:
    """Share a descriptor over a socket of this process, as workers of a DataLoader share tensors."""
    connection.send(multiprocessing.Pipe()[0])
    time.sleep(600)


def wait_with_sockets(ready: str, go: str) -> str:
    """Write this process's pid to a file, and wait until another file exists."""
    with _opened():
        Path(ready + ".new").write_text(str(os.getpid()))
        Path(ready + ".new").rename(ready)
        while not Path(go).exists():
            time.sleep(0.02)
    return "done"


def end_with_sockets() -> None:
    """Kill this process while the sockets are open."""
    with _opened():
        os.kill(os.getpid(), 9)


def look_at(folder: str, pid_file: str) -> None:
    """Write this process's pid to a file, and look for a file in the folder."""
    Path(pid_file).write_text(str(os.getpid()))
    Path(folder, "file").stat()
