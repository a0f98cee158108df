"""What a fork server and its callers do not fall for: garbage, other users, folders that are not safe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forkservers
import pytest
from forkservers import Client, only_server, until_only
from processes import is_running, wait_until

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerStartError
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver import control, identity, sockets

pytestmark = forkservers.marks(own="folder")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

STRANGER = 54321
FORKSERVER = {"start_method": "forkserver"}


def call() -> int:
    """Call in this process; returns the pid of the server."""
    server = run_in_worker("tasks_forkserver:server", **FORKSERVER)
    assert isinstance(server, int)
    return server


def connect() -> socket.socket:
    return sockets.connect(only_server().name, 10)


def record(**fields: Any) -> dict[str, Any]:
    seen = {"digests": identity.digests(os.environ, os.environ), "threads": {}, "path": sys.path}
    told = {"is_confined": False, "is_on_gpu": False, "setup": None, "label": "test", "kind": ""}
    return {**seen, **told, **fields}


def own() -> int:
    """What only the worker reads."""
    inherited = {"environ": dict(os.environ), "path": sys.path, "umask": 0o22}
    return messages.memory_file({"inherited": inherited, "env": {}})


def raw(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


def message(op: object, *descriptors: Callable[[], int], **fields: Any) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        opened = [each() for each in descriptors]
        messages.send(connection, {"op": op, **fields}, opened)
        for descriptor in opened:
            os.close(descriptor)

    return send


def here() -> int:
    return os.open(".", os.O_PATH | os.O_DIRECTORY)


def nothing() -> int:
    return os.open(os.devnull, os.O_RDWR)


def text() -> int:
    descriptor = os.memfd_create("text")
    os.write(descriptor, b"{]")
    return descriptor


def in_file(file: Callable[[], int]) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        opened = file()
        socket.send_fds(connection, [b'{"in_file": true}'], [opened])
        os.close(opened)

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
    "in a folder": in_file(here),
    "text in a file": in_file(text),
    "open without a descriptor": message("open", record=record()),
    "open without a record": message("open", here, own),
    "open with text as record": message("open", here, own, record="text"),
    "open with an incomplete record": message("open", here, own, record={}),
    "open with a list as environment": message("open", here, own, record=record(digests=[1, 2])),
    "open with a number as path": message("open", here, own, record=record(path=3)),
    "open with one descriptor": message("open", here, record=record()),
    "fork without open": message("fork", *[nothing] * 4),
    "reap without fork": message("reap"),
    "preload without anything": message("preload"),
    "preload of nothing": message("preload", here, nothing, nothing, own),
    "preload in nothing": message("preload", here, nothing, nothing, start=START),
    "preload with text": message("preload", here, nothing, nothing, text, start=START),
    "many descriptors": message("status", *[nothing] * 200),
}


class TestGarbage:
    @pytest.mark.parametrize("send", GARBAGE.values(), ids=GARBAGE.keys())
    def test_the_server_goes_on(self, send: Callable[[socket.socket], None]) -> None:
        server = call()
        before = settled_descriptors(server)
        connection = connect()
        with suppress(OSError):  # larger than the kernel takes
            send(connection)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):  # its answer, if it has one
            pass
        connection.close()
        assert call() == server
        assert wait_until(lambda: open_descriptors(server) == before), open_descriptors(server)

    def test_a_worker_is_not_reaped_by_another_connection(self, tmp_path: Path) -> None:
        """The other one's request fails; it does not wait for somebody else's worker."""
        started, go = tmp_path / "started", tmp_path / "go"
        with Client() as working, connect_after(call) as connection:
            working.send("tasks_forkserver:wait", str(started), str(go))
            assert wait_until(started.exists)
            messages.send(connection, {"op": "reap"})
            assert answer(connection) is None
            assert call() == only_server().pid
            go.touch()
            assert working.receive() == only_server().pid

    @pytest.mark.parametrize("twice", [False, True])
    def test_closed_after_open(self, twice: bool) -> None:
        server = call()
        before = settled_descriptors(server)
        with connect_after(call) as connection:
            message("open", here, own, record=record())(connection)
            assert answer(connection) == {"fit": True}
            if twice:
                message("open", here, own, record=record())(connection)
                assert answer(connection) is None
        assert call() == server
        assert wait_until(lambda: open_descriptors(server) == before), open_descriptors(server)

    def test_closed_after_fork(self) -> None:
        """The worker has nobody who waits for it, and ends."""
        server = call()
        before = settled_descriptors(server)
        with connect_after(call) as connection:
            life, write = os.pipe()
            message("open", here, own, record=record())(connection)
            answer(connection)
            message("fork", lambda: os.dup(life), nothing, nothing, nothing, label="")(connection)
            forked = answer(connection)
            assert forked is not None
            pid = forked["pid"]
            os.close(life)
            os.close(write)
        assert wait_until(lambda: not Path(f"/proc/{pid}").exists())
        assert call() == server
        assert wait_until(lambda: open_descriptors(server) == before), open_descriptors(server)


def answer(connection: socket.socket) -> dict[str, Any] | None:
    """Return the answer to a message; None where the server has closed the connection instead."""
    try:
        return messages.receive_answer(connection)
    except messages.Gone:
        return None


@contextmanager
def connect_after(first: Callable[[], int]) -> Iterator[socket.socket]:
    """Yield a connection to the server that a call leaves behind."""
    first()
    with connect() as connection:
        yield connection


def settled_descriptors(pid: int) -> list[str]:
    """Return those that stay open, once the server has seen that earlier calls are over."""
    found = [open_descriptors(pid)]

    def is_settled() -> bool:
        time.sleep(0.05)
        found.append(open_descriptors(pid))
        return found[-1] == found[-2]

    assert wait_until(is_settled)
    return found[-1]


def open_descriptors(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            what = str(link.readlink())
            found.append("socket" if what.startswith("socket:") else what)
    return sorted(found)


AS_STRANGER = """
import ctypes, os, socket, sys
os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 0)  # another user's process, except for files
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
    def test_are_refused_if_they_get_to_the_socket(self, folder: Path) -> None:
        server = call()
        program = [sys.executable, "-S", "-c", AS_STRANGER, str(folder / f"{only_server().name}.socket")]
        answer = subprocess.run(program, capture_output=True, text=True, timeout=150, check=True).stdout
        assert answer in ("answer b''\n", "ConnectionResetError\n", "BrokenPipeError\n")
        assert call() == server

    def test_a_server_of_theirs_is_not_used(self, folder: Path) -> None:
        """Not even root's callers hand their descriptors to somebody else's process."""
        server = call()
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
        assert wait_until(lambda: not is_running(server))  # its socket was away for a moment
        assert call() != server


UNSAFE: dict[str, Callable[[Path], object]] = {
    "others can write": lambda path: (path.mkdir(), path.chmod(0o770)),
    "a link": lambda path: path.symlink_to(tempfile.mkdtemp(dir=path.parent)),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a file": lambda path: path.touch(),
    "somebody else's": lambda path: (path.mkdir(mode=0o700), os.chown(path, STRANGER, STRANGER)),
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=needs_root if name == "somebody else's" else ())
        for name, make in UNSAFE.items()
    ],
)
def test_an_unsafe_folder(make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="flower-gpu-test-") as parent:
        path = Path(parent, f"flower-gpu-{os.getuid()}")
        monkeypatch.setenv("FLOWER_GPU_STATE_DIR", parent)
        make(path)
        reason = "must be a folder of this user that nobody else|account .* has made .*, the folder of"
        with pytest.raises(WorkerStartError, match=reason) as caught:
            call()
        assert str(path) in str(caught.value) and "FLOWER_GPU_STATE_DIR" in str(caught.value)
        assert not path.is_dir() or not list(path.iterdir())
        assert control.status() == [] == control.stop()
        if not path.is_file():
            return
        with Client(env={"FLOWER_GPU_START_METHOD": "auto"}) as other:  # slower, but it works
            for _ in range(2):
                assert other.call("tasks_forkserver:server") == other.pid
            assert other.errors().count("RuntimeWarning: workers are spawned, which is slower") == 1
            assert str(path) in other.errors()


def test_a_long_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Longer than an address of a socket."""
    with forkservers.own_servers(light=True) as short:
        monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(short / ("long" * 50) / ("longer" * 30)))
        server = call()
        assert until_only(lambda status: status.calls == 1).pid == server
        assert call() == server
        assert control.stop(wait_s=20) == [server]
