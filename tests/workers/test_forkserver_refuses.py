"""Fork servers and callers refuse garbage, other users, and folders that are not safe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forkservers
import pytest
from forkservers import Client, call_server, only_server, until_only
from processes import is_running, settled, wait_until

from flower_gpu.errors import WorkerStartError
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver import control, identity, sockets

pytestmark = forkservers.marks(fixture="folder")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

STRANGER = 54321
FORKSERVER = {"start_method": "forkserver"}


def connect() -> socket.socket:
    return sockets.connect(only_server().name, 10)


def record(**fields: Any) -> dict[str, Any]:
    caller_state = {"digests": identity.digests(os.environ, os.environ), "threads": {}, "path": sys.path}
    call_state = {"is_confined": False, "is_on_gpu": False, "setup": None, "label": "test", "kind": ""}
    return {**caller_state, **call_state, **fields}


def worker_file() -> int:
    """Return a file with the part of a request that only the worker reads."""
    inherited = {"environ": dict(os.environ), "path": sys.path, "umask": 0o22}
    return messages.memory_file({"inherited": inherited, "env": {}})


def raw(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


def message(op: object, *descriptors: Callable[[], int], **fields: Any) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        opened = [open_file() for open_file in descriptors]
        messages.send(connection, {"op": op, **fields}, opened)
        for descriptor in opened:
            os.close(descriptor)

    return send


def working_folder() -> int:
    return os.open(".", os.O_PATH | os.O_DIRECTORY)


def null_device() -> int:
    return os.open(os.devnull, os.O_RDWR)


def broken_json() -> int:
    descriptor = os.memfd_create("text")
    os.write(descriptor, b"{]")
    return descriptor


def in_file(file: Callable[[], int]) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        descriptor = file()
        socket.send_fds(connection, [b'{"in_file": true}'], [descriptor])
        os.close(descriptor)

    return send


START = {"name": "0" * 20, "idle_s": 1.0, "without": [], "preload": []}
GARBAGE = {
    "nothing": raw(b""),
    "bytes": raw(os.urandom(1000)),
    "half a message": raw(b'{"op": "op'),
    "not an object": raw(b'["open"]'),
    "nested deeply": raw(b"[" * 60_000),
    "too long": raw(b'{"op": "' + b"x" * 100_000 + b'"}'),
    "no operation": raw(b"{}"),
    "unknown operation": message("explode"),
    "a method": message("message"),
    "an attribute": message("signal"),
    "no name": message(7),
    "in a file that did not come": raw(b'{"in_file": true}'),
    "in a folder": in_file(working_folder),
    "text in a file": in_file(broken_json),
    "open without a descriptor": message("open", record=record()),
    "open without a record": message("open", working_folder, worker_file),
    "open with text as record": message("open", working_folder, worker_file, record="text"),
    "open with an incomplete record": message("open", working_folder, worker_file, record={}),
    "open with a list as environment": message(
        "open", working_folder, worker_file, record=record(digests=[1, 2])
    ),
    "open with a number as path": message("open", working_folder, worker_file, record=record(path=3)),
    "open with one descriptor": message("open", working_folder, record=record()),
    "fork without open": message("fork", *[null_device] * 4),
    "reap without fork": message("reap"),
    "preload without anything": message("preload"),
    "preload of nothing": message("preload", working_folder, null_device, null_device, worker_file),
    "preload in nothing": message("preload", working_folder, null_device, null_device, start=START),
    "preload with text": message(
        "preload", working_folder, null_device, null_device, broken_json, start=START
    ),
    "many descriptors": message("status", *[null_device] * 200),
}


class TestGarbage:
    @pytest.mark.parametrize("send", GARBAGE.values(), ids=GARBAGE.keys())
    def test_garbage_does_not_harm_the_server(self, send: Callable[[socket.socket], None]) -> None:
        server = call_server()
        before = settled(lambda: open_descriptors(server))
        connection = connect()
        with suppress(OSError):  # The message may be larger than the kernel allows.
            send(connection)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):  # Skip a possible answer.
            pass
        connection.close()
        assert call_server() == server
        assert wait_until(lambda: open_descriptors(server) == before), open_descriptors(server)

    def test_a_worker_is_not_reaped_by_another_connection(self, tmp_path: Path) -> None:
        """The request of the other connection fails without waiting for a worker that it did not fork."""
        started, go = tmp_path / "started", tmp_path / "go"
        with Client() as working, connect_after(call_server) as connection:
            working.send("tasks_forkserver:wait", str(started), str(go))
            assert wait_until(started.exists)
            messages.send(connection, {"op": "reap"})
            assert answer(connection) is None
            assert call_server() == only_server().pid
            go.touch()
            assert working.receive() == only_server().pid

    @pytest.mark.parametrize("twice", [False, True])
    def test_a_connection_closed_after_open_leaks_nothing(self, twice: bool) -> None:
        server = call_server()
        before = settled(lambda: open_descriptors(server))
        with connect_after(call_server) as connection:
            message("open", working_folder, worker_file, record=record())(connection)
            assert answer(connection) == {"fit": True}
            if twice:
                message("open", working_folder, worker_file, record=record())(connection)
                assert answer(connection) is None
        assert call_server() == server
        assert wait_until(lambda: open_descriptors(server) == before), open_descriptors(server)

    def test_a_worker_ends_when_its_connection_is_closed(self) -> None:
        """No caller waits for the worker any longer."""
        server = call_server()
        before = settled(lambda: open_descriptors(server))
        with connect_after(call_server) as connection:
            life, write = os.pipe()
            message("open", working_folder, worker_file, record=record())(connection)
            answer(connection)
            message("fork", lambda: os.dup(life), null_device, null_device, null_device, label="")(connection)
            forked = answer(connection)
            assert forked is not None
            pid = forked["pid"]
            os.close(life)
            os.close(write)
        assert wait_until(lambda: not Path(f"/proc/{pid}").exists())
        assert call_server() == server
        assert wait_until(lambda: open_descriptors(server) == before), open_descriptors(server)


def answer(connection: socket.socket) -> dict[str, Any] | None:
    """Return the answer to a message, or None if the server has closed the connection instead."""
    try:
        return messages.receive_answer(connection)
    except messages.Gone:
        return None


@contextmanager
def connect_after(first: Callable[[], int]) -> Iterator[socket.socket]:
    """Make a call, and yield a connection to its server."""
    first()
    with connect() as connection:
        yield connection


def open_descriptors(pid: int) -> list[str]:
    targets = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # It was closed meanwhile.
            target = str(link.readlink())
            targets.append("socket" if target.startswith("socket:") else target)
    return sorted(targets)


AS_STRANGER = """
import ctypes, os, socket, sys
os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 0)  # The process belongs to another user, but opens files as root.
ctypes.CDLL(None).setfsuid(0)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(20)
try:
    connection.connect(sys.argv[1])
    connection.send(b'{"op": "status"}')
    print("answer", connection.recv(1000))
except OSError as error:
    print(type(error).__name__)
"""

LISTENING_STRANGER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
listener.bind(sys.argv[2])
listener.listen()
print("listening", flush=True)
connection, _ = listener.accept()
print(connection.recv(1000), flush=True)
"""


@needs_root
class TestOtherUsers:
    def test_other_users_are_refused_at_the_socket(self, folder: Path) -> None:
        server = call_server()
        program = [sys.executable, "-S", "-c", AS_STRANGER, str(folder / f"{only_server().name}.socket")]
        answer = subprocess.run(program, capture_output=True, text=True, timeout=150, check=True).stdout
        assert answer in ("answer b''\n", "ConnectionResetError\n", "BrokenPipeError\n")
        assert call_server() == server

    def test_a_server_of_another_user_is_not_used(self, folder: Path) -> None:
        """Not even callers of root pass their descriptors to a process of another user."""
        server = call_server()
        name = only_server().name
        path = folder / f"{name}.socket"
        kept = path.rename(folder / "kept")
        folder.chmod(0o777)
        stranger = subprocess.Popen(
            [sys.executable, "-c", LISTENING_STRANGER, str(folder), path.name],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert stranger.stdout is not None
        try:
            assert stranger.stdout.readline() == "listening\n"
            folder.chmod(0o700)
            with pytest.raises(messages.Gone, match="another user's"):
                sockets.connect(name, 10)
            assert stranger.stdout.readline() == "b''\n"
        finally:
            stranger.kill()
            stranger.communicate()
            kept.rename(path)
        # The server ends because its socket was missing for a moment.
        assert wait_until(lambda: not is_running(server))
        assert call_server() != server


UNSAFE: dict[str, Callable[[Path], object]] = {
    "others can write": lambda path: (path.mkdir(), path.chmod(0o770)),
    "a link": lambda path: path.symlink_to(tempfile.mkdtemp(dir=path.parent)),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a file": lambda path: path.touch(),
    "another user's": lambda path: (path.mkdir(mode=0o700), os.chown(path, STRANGER, STRANGER)),
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=needs_root if name == "another user's" else ())
        for name, make in UNSAFE.items()
    ],
)
def test_an_unsafe_folder_is_refused(make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="flower-gpu-test-") as parent:
        path = Path(parent, f"flower-gpu-{os.getuid()}")
        monkeypatch.setenv("FLOWER_GPU_STATE_DIR", parent)
        make(path)
        reason = "must be a folder of this user that no other user|account .* has made .*, the folder of"
        with pytest.raises(WorkerStartError, match=reason) as caught:
            call_server()
        assert str(path) in str(caught.value) and "FLOWER_GPU_STATE_DIR" in str(caught.value)
        assert not path.is_dir() or not list(path.iterdir())
        assert control.status() == [] == control.stop()
        if not path.is_file():
            return
        # With ``auto`` the calls work, but more slowly.
        with Client(env={"FLOWER_GPU_START_METHOD": "auto"}) as other:
            for _ in range(2):
                assert other.call("tasks_forkserver:server") == other.pid
            assert other.errors().count("RuntimeWarning: workers are spawned, which is slower") == 1
            assert str(path) in other.errors()


def test_the_folder_may_have_a_long_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The path is longer than the address of a socket may be."""
    with forkservers.own_servers(light=True) as short:
        monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(short / ("long" * 50) / ("longer" * 30)))
        server = call_server()
        assert until_only(lambda status: status.calls == 1).pid == server
        assert call_server() == server
        assert control.stop(wait_s=20) == [server]
