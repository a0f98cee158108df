"""Tasks that create Unix sockets in all the ways in which libraries do."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path


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
