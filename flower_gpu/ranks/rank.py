"""One rank: finds the other ranks through a file, runs the user's function, and returns its part."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_gpu import files
from flower_gpu.errors import WorkerError
from flower_gpu.ranks import results
from flower_gpu.workers import events, state_folder
from flower_gpu.workers.call import Task, load_task


@dataclass(frozen=True)
class Rendezvous:
    """How a rank finds the others."""

    file: str  # file with the addresses of all ranks (torch.distributed.FileStore)
    rank: int  # number of this rank, from 0
    world_size: int
    timeout_s: float  # seconds that ranks wait for each other at one point


@contextmanager
def meeting_place() -> Iterator[str]:
    """Yield the path of a new file that only processes of this account can open.

    The file is in the folder for this worker's sockets, which is removed with the worker. An unnamed file
    would not work, because ranks under the GPU guard cannot open files of other processes. The usual TCP
    store would need a free port, and another client could take that port first.
    """
    parent = state_folder.socket_folder()
    with ExitStack() as stack:
        try:
            # The path may be valid in this process only, such as one below /proc/self.
            resolved = None if parent is None else Path(parent).resolve()
            folder = stack.enter_context(files.temporary_folder("ranks", resolved))
        except OSError as error:
            raise WorkerError(f"cannot start ranks: {error}") from error
        yield str(folder / "store")


def remove_stale_nccl_sockets() -> None:
    """Remove the socket files of NCCL that killed ranks have left behind."""
    folder = Path("/tmp")  # NCCL always uses this folder
    for path in [folder / name for name in files.names_with_prefix(folder, "nccl-socket-")]:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            status = path.lstat()
            if status.st_uid == os.getuid() and stat.S_ISSOCK(status.st_mode):
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:  # no process has the socket open
                    path.unlink()


def main(rendezvous: Rendezvous, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the user's function in this rank, and return the part of its result that the call needs."""
    value = run(rendezvous, task, args, kwargs)
    return value if rendezvous.rank == 0 else results.part_of(value)


def run(rendezvous: Rendezvous, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the function in this rank, and return its result."""
    # A rank has one GPU, so a Distributed calls its function directly here.
    function = load_task(task)
    from flower_gpu.pytorch import distributed

    try:
        with distributed.joined(
            rendezvous.file, rendezvous.rank, rendezvous.world_size, rendezvous.timeout_s
        ):
            return function(*args, **kwargs)
    except Exception as error:
        events.send("rank_failed", of_others=distributed.is_of_others(error))
        raise
