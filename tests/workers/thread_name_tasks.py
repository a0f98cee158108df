"""What NVIDIA's driver does in a process that starts CUDA: it names a thread from another one. And more."""

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
    """Name a thread as C programs do; return its name, or the error."""
    with thread() as other:
        code = ctypes.CDLL(None).pthread_setname_np(ctypes.c_ulong(other.ident or 0), NAME.encode())
        return errno.errorcode[code] if code else _name(other.native_id)


def names_it_by_number() -> str:
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

    (found,) = {name for names in DataLoader(_Names(), num_workers=2) for name in names}  # type: ignore[arg-type]
    return str(found)


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
    """Start CUDA; return the device, or the error."""
    import torch

    try:
        return str(torch.zeros(4, device="cuda").device)
    except RuntimeError as error:
        return str(error)


def starts_cuda() -> dict[str, str]:
    with multiprocessing.get_context("fork").Pool(1) as pool:  # before this process starts it
        in_fork = pool.apply(allocates)
    return {"fork": in_fork, "here": allocates()}


def everywhere(ways: list[str]) -> dict[str, str]:
    return {way: globals()[way]() for way in ways}


# What must stay closed ------------------------------------------------------------------------------------


def writable(pids: dict[str, int]) -> dict[str, list[str]]:
    """Return what can be opened for writing in ``/proc``: of these processes, this one, a child, and else."""
    with thread() as other, subprocess.Popen(["sleep", "600"]) as child:
        pids = {**pids, "child": child.pid, "self": os.getpid()}
        found = {}
        for name, pid in pids.items():
            words = {str(pid): name, str(other.native_id): "other thread"}
            opened = [path.split("/") for path in _files(f"/proc/{pid}") if _can_be_written(path)]
            found[name] = sorted("/".join(words.get(word, word) for word in path) for path in opened)
        found["else"] = sorted(filter(_can_be_written, _files("/proc")))
        child.kill()
    return found


def _files(top: str) -> Iterator[str]:
    """Yield the files below a folder of ``/proc``; no links, no descriptors, no other process's folder."""
    for folder, folders, files in os.walk(top):
        folders[:] = [each for each in folders if each not in ("fd", "map_files")]
        if folder == "/proc":
            folders[:] = [each for each in folders if not each.isdecimal()]
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
    """Have a child send its open file over; say what comes of writing there."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        socket.send_fds(theirs, [b"x"], [os.open(f"/proc/self/task/{os.getpid()}/comm", os.O_RDWR)])
        theirs.recv(1)
        os._exit(0)
    _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    try:
        os.write(descriptor, b"of another")
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        ours.send(b"x")
        os.waitpid(pid, 0)
    return "written"


# What an app can do to the process that answers -----------------------------------------------------------


def sends_it_what_it_does_not_expect() -> str:
    """Send files that are none of its, and datagrams without any."""
    own = Path(os.environ["HOME"]).parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaking:
        speaking.connect(f"/proc/self/fd/{os.open(own, os.O_PATH)}/names")
        for count in (0, 1, 16, 100):
            descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
            socket.send_fds(speaking, [b"x"], descriptors)
            for each in descriptors:
                os.close(each)
    return names_a_thread()


def ends_processes_that_wait() -> str:
    """End some while they wait for an answer."""
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
    """Open by addresses that are none, and by paths that are nearly right."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = os.getpid()
    page = -(1 << 63) // 4096 * 4096
    found = []
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
        found.append("opened" if descriptor >= 0 else errno.errorcode[ctypes.get_errno()])
    return found


def limit_of_files() -> Any:
    """Ask with no number left for another file."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    path = f"/proc/self/task/{os.getpid()}/comm"
    held = []
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        os.open(path, os.O_RDWR)
    except OSError as error:
        found = errno.errorcode[error.errno or 0]
    for each in held:
        os.close(each)
    return found, names_a_thread()
