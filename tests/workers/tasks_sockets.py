"""Tasks that make Unix sockets, in all the ways in which libraries do."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Listener
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset


@contextmanager
def _opened() -> Iterator[None]:
    """Have a Listener, a Manager, a DataLoader's worker, and the fork server of multiprocessing."""
    loader = DataLoader(TensorDataset(torch.arange(8.0)), num_workers=1, multiprocessing_context="fork")
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    child.start()
    with Listener(), multiprocessing.get_context("spawn").Manager() as manager:
        batches = iter(loader)
        next(batches)
        manager.dict()
        yield
    child.kill()
    child.join()


def wait_with_sockets(ready: str, go: str) -> str:
    """Say who this is, and wait until there is a file."""
    with _opened():
        Path(ready + ".new").write_text(str(os.getpid()))
        Path(ready + ".new").rename(ready)
        while not Path(go).exists():
            time.sleep(0.02)
    return "done"


def end_with_sockets() -> None:
    """End at once, with all of that."""
    with _opened():
        os.kill(os.getpid(), 9)
