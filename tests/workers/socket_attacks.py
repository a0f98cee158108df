"""Attacks by a confined worker on the sockets of fork servers and of other workers.

A worker of these tests can open everything except the state folder, which holds the sockets.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from flower_gpu import landlock, run_in_worker
from flower_gpu.workers import messages, state_folder
from flower_gpu.workers.forkserver import control, sockets

# With these flags, open(2) permits neither reading nor writing.
_IOCTL_ONLY = os.O_WRONLY | os.O_RDWR
_OPEN_BY_PIDFD = 438  # pidfd_getfd


def confine() -> None:
    """Give up access to the state folder and to other processes."""
    rights, folder = {}, Path("/")
    for part in state_folder.state_dir().parts[1:]:
        siblings = [entry for entry in folder.iterdir() if entry.name != part and not entry.is_symlink()]
        rights |= {str(entry): landlock.WRITE | landlock.DEVICE for entry in siblings}
        folder /= part
    landlock.confine(rights)


def _file() -> Path:
    return state_folder.state_dir() / sockets.PROOF


def _new_file() -> Path:
    path = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"])) / sockets.PROOF
    path.touch(0o600)
    return path


def _opened(flags: int) -> Callable[[], list[int]]:
    return lambda: [os.open(_file(), flags)]


def _another_file() -> list[int]:
    return [os.open(_new_file(), os.O_RDONLY)]


def _reopened() -> list[int]:
    return [os.open(f"/proc/self/fd/{os.open(_file(), os.O_PATH)}", os.O_RDONLY)]


def _linked() -> list[int]:
    link = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"])) / sockets.PROOF
    link.hardlink_to(_file())
    return [os.open(link, os.O_RDONLY)]


def _moved() -> list[int]:
    new_file = _new_file()
    descriptor = os.open(new_file, os.O_RDONLY)
    new_file.replace(_file())
    return [descriptor]


def _created_anew() -> list[int]:
    _file().unlink()
    return [os.open(_file(), os.O_RDONLY | os.O_CREAT, 0o600)]


def _opened_by_proc(pid: int, number: int) -> list[int]:
    return [os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)]


def _opened_by_pidfd(pid: int, number: int) -> list[int]:
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_OPEN_BY_PIDFD, os.pidfd_open(pid), number, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return [descriptor]


def _methods(holder: tuple[int, int]) -> dict[str, Callable[[], list[int]]]:
    return {
        "nothing": list,
        "opened": _opened(os.O_RDONLY),
        "opened for reading and writing": _opened(os.O_RDWR),
        "opened by its path only": _opened(os.O_PATH),
        "opened for ioctl only": _opened(_IOCTL_ONLY),
        "opened by its path, then through /proc": _reopened,
        "another file": _another_file,
        "a memory file": lambda: [os.memfd_create(sockets.PROOF)],
        "a folder": lambda: [os.open(tempfile.mkdtemp(dir=os.environ["TMPDIR"]), os.O_RDONLY)],
        "two files": lambda: [*_another_file(), *_another_file()],
        "by another process's /proc": lambda: _opened_by_proc(*holder),
        "by another process's pidfd": lambda: _opened_by_pidfd(*holder),
        "linked": _linked,
        "replaced by a file of its own": _moved,
        "created anew": _created_anew,
    }


@contextmanager
def _connected(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(30)
        connection.connect(str(state_folder.state_dir() / f"{name}.socket"))
        yield connection


def _asked(connection: socket.socket, message: dict[str, Any], descriptors: list[int]) -> str:
    try:
        messages.send(connection, message, descriptors)
        return str(sorted(messages.receive_answer(connection)))
    except messages.Gone:
        return "closed"


def attempts(name: str, holder: tuple[int, int], *, confined: bool) -> dict[str, str]:
    """Ask a fork server for its status, each time with another proof, and return the results.

    ``holder``: a process that has the file with the proof open, and the descriptor's number in it.
    """
    if confined:
        confine()
    results = {}
    for method, open_them in _methods(holder).items():
        try:
            shown = open_them()
        except OSError as error:
            results[method] = type(error).__name__
            continue
        with _connected(name) as connection, suppress(messages.Gone):
            messages.send(connection, sockets.CALLER, shown)
            results[method] = _asked(connection, {"op": "status"}, [])
        for descriptor in shown:
            os.close(descriptor)
    return results


def requests(name: str, record: dict[str, Any]) -> list[str]:
    """Send a fork server each request that callers send, from a confined process."""
    confine()
    start = {"name": "0" * 20, "idle_s": 60.0, "without": [], "preload": [["os:_exit", {}]]}
    nothing = [os.open(os.devnull, os.O_RDWR) for _ in range(7)]
    root = os.open("/", os.O_PATH)
    results = []
    for message, descriptors in (
        ({"op": "status"}, []),
        ({"op": "stop"}, []),
        ({"op": "stay"}, []),
        ({"op": "learn", "names": ["json"], "kind": ""}, []),
        ({"op": "open", "record": record, "now": True}, [root, nothing[0]]),
        ({"op": "fork"}, nothing),
        ({"op": "preload", "start": start}, [root, *nothing[:3]]),
        (sockets.CALLER, [root]),
    ):
        with _connected(name) as connection:
            results.append(_asked(connection, message, descriptors))
    return results


def hold_connections(name: str, started: str, until: str) -> None:
    """Open many connections to a fork server, send nothing, and wait."""
    confine()
    connections = [_connected(name) for _ in range(20)]
    for connection in connections:
        connection.__enter__()
    Path(started).touch()
    while not Path(until).exists():
        os.sched_yield()


def calls(*methods: str) -> list[Any]:
    """Call in workers from this worker, as any app may."""
    confine()
    results: list[Any] = []
    for method in methods:
        try:
            results.append(run_in_worker("socket_attacks:can_read_state", start_method=method))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def can_read_state() -> bool:
    try:
        return any(True for _ in os.scandir(state_folder.state_dir()))
    except PermissionError:
        return False


def servers() -> list[str]:
    confine()
    return [status.name for status in control.status()]


def open_files() -> dict[str, str]:
    """Return the targets of this worker's open descriptors, by number."""
    targets = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # This descriptor listed the folder.
            targets[link.name] = str(link.readlink())
    return targets


def values() -> list[str]:
    """Return the values of callers' variables that this worker can read in its memory."""
    values_in_memory = set()
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for line in maps:
            fields = line.split()
            if "r" not in fields[1] or fields[-1] in ("[vvar]", "[vsyscall]", "[vvar_vclock]"):
                continue
            begin, end = (int(number, 16) for number in fields[0].split("-"))
            memory.seek(begin)
            with suppress(OSError):  # The page lies behind the end of a file.
                for value in re.findall(_VALUE, memory.read(end - begin)):
                    values_in_memory.add(value.decode())
    return sorted(value for value in values_in_memory if value.endswith(ending(value.partition("+")[0])))


_VALUE = rb"value-of-[a-z]+\+[0-9a-f]{16}"


def ending(name: str) -> str:
    """Return the end of a value, which no memory holds by chance."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _key() -> bytes:
    """Return the key with which multiprocessing authenticates its sockets."""
    return bytes(process.current_process().authkey)


def listen(ready: str, until: str) -> str:
    """Listen as multiprocessing does, for processes with the key. Return the message or the error."""
    with Listener(family="AF_UNIX", authkey=_key()) as listener:
        listener._listener._socket.settimeout(60)  # type: ignore[attr-defined]
        Path(ready + ".new").write_text(str(listener.address))
        Path(ready + ".new").rename(ready)
        try:
            with listener.accept() as connection:
                return str(connection.recv())
        except Exception as error:
            return type(error).__name__
        finally:
            Path(until).touch()


def speak(address: str) -> str:
    """Connect to another worker's listener with the key of this worker."""
    try:
        with Client(address, authkey=_key()) as connection:
            connection.send("something to unpickle")
            return "sent"
    except Exception as error:
        return type(error).__name__
