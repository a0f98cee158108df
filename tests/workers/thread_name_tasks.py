"""Tasks that name a thread from another thread, as NVIDIA's driver does, and attacks on that feature."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAME = "cuda-EvtHandlr"


@contextmanager
def thread() -> Iterator[threading.Thread]:
    """Yield another thread of this process."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        yield other
    finally:
        end.set()
        other.join()


def names_a_thread(_: int = 0) -> str:
    """Name a thread as C programs do, and return its name or the error."""
    with thread() as other:
        code = ctypes.CDLL(None).pthread_setname_np(ctypes.c_ulong(other.ident or 0), NAME.encode())
        return errno.errorcode[code] if code else _name(other.native_id)


def names_a_thread_by_number() -> str:
    with thread() as other:
        with Path(f"/proc/{os.getpid()}/task/{other.native_id}/comm").open("r+") as file:
            file.write(NAME)
        return _name(other.native_id)


def _name(number: int | None) -> str:
    return Path(f"/proc/self/task/{number}/comm").read_text().strip()


def in_a_fork() -> str:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, names_a_thread().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(read, 100).decode()


def in_a_fork_of_a_fork() -> str:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(in_a_fork)


class _Names:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> str:
        return names_a_thread()


def in_a_data_loader() -> str:
    from torch.utils.data import DataLoader

    (result,) = {name for names in DataLoader(_Names(), num_workers=2) for name in names}  # type: ignore[arg-type]
    return str(result)


def in_a_worker_of_a_worker() -> str:
    from flower_gpu import run_in_worker

    return run_in_worker("thread_name_tasks:names_a_thread", start_method="spawn")


def in_a_spawned_process() -> str:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(names_a_thread)


def in_a_program() -> str:
    code = "import sys; sys.path[:0] = sys.argv[1:]; from thread_name_tasks import *; print(names_a_thread())"
    line = [sys.executable, "-c", code, str(Path(__file__).parent)]
    return subprocess.run(line, env={}, capture_output=True, text=True, check=True).stdout.strip()


def allocates() -> str:
    """Start CUDA, and return the device or the error."""
    import torch

    try:
        return str(torch.zeros(4, device="cuda").device)
    except RuntimeError as error:
        return str(error)


def starts_cuda() -> dict[str, str]:
    # The fork must come before this process starts CUDA.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        in_fork = pool.apply(allocates)
    return {"fork": in_fork, "worker": allocates()}


def everywhere(ways: list[str]) -> dict[str, str]:
    return {way: globals()[way]() for way in ways}


# Files that must stay read-only ---------------------------------------------------------------------------


def writable(pids: dict[str, int]) -> dict[str, list[str]]:
    """Return the files in ``/proc`` that can be opened for writing.

    The keys are the given processes, this process (``self``), a child, and all other files (``else``).
    """
    with thread() as other, subprocess.Popen(["sleep", "600"]) as child:
        pids = {**pids, "child": child.pid, "self": os.getpid()}
        files_by_process = {}
        for name, pid in pids.items():
            words = {str(pid): name, str(other.native_id): "other thread"}
            opened = [path.split("/") for path in _files(f"/proc/{pid}") if _can_be_written(path)]
            files_by_process[name] = sorted(
                "/".join(words.get(word, word) for word in path) for path in opened
            )
        files_by_process["else"] = sorted(filter(_can_be_written, _files("/proc")))
        child.kill()
    return files_by_process


def _files(top: str) -> Iterator[str]:
    """Yield the files below a folder of ``/proc``, without links, descriptors and other processes."""
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in ("fd", "map_files")]
        if folder == "/proc":
            folders[:] = [name for name in folders if not name.isdecimal()]
        for file in files:
            path = f"{folder}/{file}"
            with suppress(OSError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    yield path


def _can_be_written(path: str) -> bool:
    is_open = False
    for flags in (os.O_WRONLY, os.O_RDWR):
        with suppress(OSError):
            os.close(os.open(path, flags | os.O_NONBLOCK))
            is_open = True
    return is_open


def writes_through_an_open_file() -> str:
    """Receive an open file from a child, and return the result of writing to it."""
    receiving, sending = socket.socketpair()
    if (pid := os.fork()) == 0:
        socket.send_fds(sending, [b"x"], [os.open(f"/proc/self/task/{os.getpid()}/comm", os.O_RDWR)])
        sending.recv(1)
        os._exit(0)
    _, (descriptor,), _, _ = socket.recv_fds(receiving, 1, 1)
    try:
        os.write(descriptor, b"of another")
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        receiving.send(b"x")
        os.waitpid(pid, 0)
    return "written"


# Attacks on the process that answers ----------------------------------------------------------------------


def sends_unexpected_descriptors() -> str:
    """Send unrelated files, and datagrams without descriptors."""
    folder = Path(os.environ["HOME"]).parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.connect(f"/proc/self/fd/{os.open(folder, os.O_PATH)}/names")
        for count in (0, 1, 16, 100):
            descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
            socket.send_fds(connection, [b"x"], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    return names_a_thread()


def kills_waiting_processes() -> str:
    """Kill processes while they wait for an answer."""
    path = f"/proc/self/task/{os.getpid()}/comm"
    for _ in range(20):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            while True:
                with suppress(OSError):
                    os.close(os.open(path, os.O_RDWR))
                os.write(write, b"x")
        os.read(read, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    return names_a_thread()


def opens_by_strange_paths() -> list[str]:
    """Open files by invalid addresses, and by paths that are almost right."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = os.getpid()
    page = -(1 << 63) // 4096 * 4096
    results = []
    for path in (
        *(ctypes.c_void_p(address) for address in (0, 1, page, -1, 1 << 46)),
        *(f"/proc/self/task/{number}/{rest}".encode() for rest in ("oom_score_adj", "comm/", "attr/../comm")),
        *(f"/proc/{rest}".encode() for rest in ("self/comm", f"self/task/{number}/comm" + "/." * 40)),
        f"/proc/1/task/{os.getppid()}/comm".encode(),
        b"/proc/self/task/../../1/comm",
        b"/proc/self/task/99999999999999999999/comm",
    ):
        ctypes.set_errno(0)
        descriptor = libc.open(path, os.O_RDWR)
        results.append("opened" if descriptor >= 0 else errno.errorcode[ctypes.get_errno()])
    return results


def limit_of_files() -> Any:
    """Open the file when the limit of open files is reached, and name a thread afterwards."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    path = f"/proc/self/task/{os.getpid()}/comm"
    descriptors = []
    with suppress(OSError):
        while True:
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    try:
        os.open(path, os.O_RDWR)
    except OSError as error:
        error_name = errno.errorcode[error.errno or 0]
    for descriptor in descriptors:
        os.close(descriptor)
    return error_name, names_a_thread()
