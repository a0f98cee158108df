"""One rank: meets the others over a file, runs the user's function, gives back its part."""

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
    """The meeting of a rank with the others."""

    file: str  # over which they tell each other their addresses (torch.distributed.FileStore)
    rank: int  # its number, from 0 on
    world_size: int
    timeout_s: float  # that they wait for each other at one point


@contextmanager
def meeting_place() -> Iterator[str]:
    """Yield the path of a new file that only processes of this account can open.

    In the folder for this worker's sockets, which goes with the worker, however that ends. Not a file without
    a name: under the GPU guard no rank can look into another process. Ports that one chooses for a store of
    its own, the usual way, may be taken by another client in the same instant.
    """
    parent = state_folder.socket_folder()  # which may be a name that only this process can use
    with ExitStack() as stack:
        try:
            place = None if parent is None else Path(parent).resolve()
            folder = stack.enter_context(files.temporary_folder("ranks", place))
        except OSError as error:
            raise WorkerError(f"cannot start ranks: {error}") from error
        yield str(folder / "store")


def remove_left_of_nccl() -> None:
    """Remove the files of sockets that ranks of NCCL had when they were killed."""
    folder = Path("/tmp")  # NCCL takes no other one
    for path in [folder / name for name in files.names_with_prefix(folder, "nccl-socket-")]:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            found = path.lstat()
            if found.st_uid == os.getuid() and stat.S_ISSOCK(found.st_mode):
                try:
                    asking.connect(str(path))
                except ConnectionRefusedError:  # nobody has it open
                    path.unlink()


def main(rendezvous: Rendezvous, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the user's function among the others; runs in a worker of its own."""
    value = run(rendezvous, task, args, kwargs)
    return value if rendezvous.rank == 0 else results.part_of(value)


def run(rendezvous: Rendezvous, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the function in this rank, and return its result."""
    function = load_task(task)  # what a Distributed is in a rank, which has one GPU: a call of its function
    from flower_gpu.pytorch import distributed

    try:
        with distributed.joined(
            rendezvous.file, rendezvous.rank, rendezvous.world_size, rendezvous.timeout_s
        ):
            return function(*args, **kwargs)
    except Exception as error:
        events.send("rank_failed", of_others=distributed.is_of_others(error))
        raise
