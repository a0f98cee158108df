"""The server process that imports Flower once and forks a program of Flower's for each request.

A fresh interpreter has to import Flower before it can run one of Flower's programs. A fork of this server has
the modules already.

The server has one thread, because a fork copies only the thread that calls it, and locks that other threads
hold would stay locked. The thread waits in a selector for two kinds of events:

- a request on a connection. The starter's connection is the first. Each forked program gets another
  connection, by which it requests the programs that it starts itself;
- the end of a child. The exit status then goes to the process that requested the program.

:class:`_ProgramForker` has that loop. In a new fork it raises ``Become``, which unwinds the stack of the
server, so that the program starts with an empty one (``_become``). The server ends when the first connection
is closed. Its programs run on.

A requester may have given up before its request is read, for example after a timeout. It then starts the
program in another way, so the server forks only if the requester still has its end of the answer's socket
open. A program inherits the server's end of that socket. So the requester sees the end of the program even
after the server has been killed.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import httpx

from flower_gpu.errors import encodable
from flower_gpu.programs.commands import (
    COMMANDS,
    SERVER_COMMANDS,
    CommandFolder,
    flowers,
    function_of,
)
from flower_gpu.programs.starter import CONNECTION_VARIABLE, Programs, Subprocess
from flower_gpu.workers import interpreter, messages
from flower_gpu.workers.forkserver import identity
from flower_gpu.workers.forkserver.forking import Become, ChildWatch
from flower_gpu.workers.forkserver.identity import script_folders
from flower_gpu.workers.life import explained
from flower_gpu.workers.own_process import facts

# Modules that Flower's programs import, some of them only at their first use. A module that this version of
# Flower lacks is skipped. A program that needs any other module imports it itself.
_MODULES: Final = (
    "flwr.cli.app",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.superlink.cli",
    "flwr.superlink.main",
    "flwr.supernode.cli",
    "flwr.supernode.main",
    "flwr.supercore.cli",
    "anyio._backends._asyncio",
    "cryptography.hazmat.backends.openssl.backend",
    "encodings.cp437",  # of archives
    "httpcore",
    "pynvml",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "flower_gpu.programs.clientapp",
    "flower_gpu.programs.flwr_clientapp",
    "flower_gpu.programs.serverapp",
    "flower_gpu.programs.superexec",
    "flower_gpu.programs.supernode",
)
# Modules of Flower that start Flower's programs by ``subprocess.Popen``.
_STARTERS: Final = (
    "flwr.superlink.cli.flower_superlink",
    "flwr.supercore.superexec.executor.subprocess_executor",
    "flwr.supernode.start_client_internal",
)
# The program that runs the ServerApp. Only it gets a thread per core for arithmetic. In other programs such
# threads would only wait, which costs time.
_COMPUTES: Final = "flwr-serverapp"
# Prefixes of variables that Python, its libraries or Flower read when they start or are imported.
_READ_AT_START: Final = ("FLWR_", "GRPC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON", "TZ")

# Exit statuses of programs that a signal killed, without the signals that ask a program to end.
_KILLED: Final = tuple(
    -number for number in signal.valid_signals() - {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
)


def read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program reads when it starts. A fork has read them in its server."""
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


def main() -> NoReturn:
    """Run the server for the connection named in the environment. In a fork, run a program instead."""
    connection = socket.socket(fileno=int(os.environ.pop(CONNECTION_VARIABLE)))
    connection.set_inheritable(False)
    _serve(connection, _MODULES, read_at_start(os.environ))


def fork_own(modules: Iterable[str]) -> None:
    """Fork a server from this process, and let it fork the programs that Flower starts here afterwards.

    Call it before the process has threads. In a fork of a server it does nothing, because that server serves
    its forks too.
    ``modules``: names of the modules that those programs import.
    """
    if sys.platform != "linux" or facts.is_program or threading.active_count() > 1:
        return
    our_end, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        our_end.close()
        os.setpgid(0, 0)  # out of reach of a terminal's Ctrl-C
        _serve(their_end, modules, read_at_start(os.environ))
    their_end.close()
    _use(Programs(our_end))


def _serve(connection: socket.socket, modules: Iterable[str], started_with: Mapping[str, str]) -> NoReturn:
    """Fork programs for the process at the other end of the connection, until it closes the connection.

    ``started_with``: the variables of :func:`read_at_start` that this process was started with.
    """
    # Limits a fork's title to the memory of the arguments. After it comes the environment, by which guard.py
    # finds processes.
    os.environ["SPT_NOENV"] = "1"
    _be_shown_as("flower-gpu: Flower's programs")
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    with suppress(OSError):
        # Each message asks for this name. The files on which it depends are read only once, here.
        identity.server_name(os.environ, (), ())
    # With the first client OpenSSL allocates 10 MB. Forks share them if it is created here.
    httpx.Client(verify=False).close()
    gc.collect()
    # Without this, a fork's collector would write to every object, and so copy its memory.
    gc.freeze()
    try:
        _ProgramForker(connection, started_with).run()
        os._exit(0)
    except Become as fork:
        become = fork.work
    interpreter.run_to_end(become())


def _be_shown_as(command: str, name: str | None = None) -> None:
    """Set the command line and the name that ``ps`` shows for this process, if setproctitle is installed."""
    with suppress(ImportError):  # on some hosts packages are installed one by one
        import setproctitle

        setproctitle.setproctitle(encodable(command))
        if name is not None:
            setproctitle.setthreadtitle(name)


@dataclass(frozen=True)
class _ProgramRequest:
    """A request to start a program: the fields of the message, and the descriptors that came with it."""

    argv: list[str]
    env: dict[str, str]
    #: Process group of the program; 0: a new group, None: a new session.
    group: int | None
    streams: list[int]  # standard input, output, error
    folder: int  # working directory
    #: Socket of the requester, which gets the process id, and the exit status later.
    reply_socket: socket.socket
    kept: list[int] = field(default_factory=list)  # descriptors that stay open in the program

    @classmethod
    def of(cls, message: Mapping[str, Any], descriptors: list[int]) -> _ProgramRequest:
        stdin, stdout, stderr, folder, reply_socket, *kept = descriptors
        return cls(
            message["argv"],
            message["env"],
            message["group"],
            [stdin, stdout, stderr],
            folder,
            socket.socket(fileno=reply_socket),
            kept,
        )

    def hand_over(self) -> None:
        """Close the descriptors that the program has now, except its standard error, which is the log."""
        for descriptor in (*self.streams[:2], self.folder, *self.kept):
            os.close(descriptor)

    def close(self) -> None:
        """Close the log and the socket of the requester."""
        os.close(self.streams[2])
        self.reply_socket.close()

    def note_end(self, status: int) -> None:
        """Send the exit status to the requester. If a signal killed the program, add a line to its log."""
        self.say({"status": status})
        if status in _KILLED:
            ending = f"was killed by {signal.Signals(-status).name} ({-status})"
            with suppress(OSError):
                os.write(self.streams[2], f"flower-gpu: {self.argv[0]} {ending}\n".encode())
        self.close()

    def say(self, reply_socket: Mapping[str, Any]) -> None:
        with suppress(messages.Gone):  # the requester has ended
            messages.send(self.reply_socket, reply_socket)


class _ProgramForker:
    """The loop of the server: it reads requests, forks programs and reports their exit statuses."""

    def __init__(self, connection: socket.socket, started_with: Mapping[str, str]) -> None:
        self._started_with = MappingProxyType(dict(started_with))
        self._first = connection
        self._running: dict[int, _ProgramRequest] = {}  # by process id
        self._has_ended = False
        self._children = ChildWatch(self._on_child)
        self._selector = self._children.selector

    def run(self) -> None:
        """Serve until the first connection is closed. In a fork, raise Become."""
        self._watch(self._first)
        while not self._has_ended:
            for key, _ in self._selector.select():
                key.data()

    def _watch(self, connection: socket.socket) -> None:
        self._selector.register(connection, selectors.EVENT_READ, partial(self._on_request, connection))

    def _on_request(self, connection: socket.socket) -> None:
        try:
            message, descriptors = messages.receive(connection)
        except messages.Gone:
            self._has_ended = connection is self._first
            self._selector.unregister(connection)
            connection.close()
            return
        request = _ProgramRequest.of(message, descriptors)
        try:
            if messages.is_closed(request.reply_socket):  # the requester has started it in another way
                raise NoEntryError("no process waits for it any longer")
            entry = find(request.argv[0], request.env)
            if read_at_start(request.env) != self._started_with:
                raise NoEntryError("its environment has other variables that are read at the start")
            self._fork(request, entry)
            return
        except NoEntryError as error:
            request.say({"refused": str(error)})
        except OSError as error:
            request.say({"refused": explained(error)})
        request.hand_over()
        request.close()

    def _fork(self, request: _ProgramRequest, entry: ProgramEntry) -> None:
        our_end, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            our_end.close()
            self._leave()
            # The socket stays open in the program, so the requester sees its end even without this server.
            request.reply_socket.detach()
            raise Become(partial(_become, entry, request, their_end))
        their_end.close()
        if request.group == 0:
            # The program does the same. But the group must exist before the requester knows the process id,
            # because it may wait for the end of the group.
            with suppress(OSError):
                os.setpgid(pid, pid)
        self._watch(our_end)
        self._running[pid] = request
        request.hand_over()
        request.say({"pid": pid})

    def _leave(self) -> None:
        """Close all sockets and descriptors of the server, in a fork."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._children.leave()
        for request in self._running.values():
            request.close()

    def _on_child(self) -> None:
        self._children.clear()
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._running.pop(pid).note_end(os.waitstatus_to_exitcode(status))


# In the fork: it becomes a program, as in a fresh interpreter, except that modules are imported already


def _become(entry: ProgramEntry, request: _ProgramRequest, connection: socket.socket) -> Callable[[], Any]:
    """Return the function of a program, after setting up its group, folder, environment and streams.

    ``connection``: connection to the server for the programs that this program starts.
    """
    if request.group is None:
        os.setsid()
    else:
        with suppress(OSError):  # the group has ended
            os.setpgid(0, request.group)
    os.fchdir(request.folder)
    os.close(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    computes = Path(entry.path).name == _COMPUTES
    thread_variables = interpreter.with_all_cores(os.environ) if computes else os.environ
    interpreter.begin([entry.path, *request.argv[1:]], request.streams, thread_variables)
    _be_shown_as(" ".join([sys.executable, *sys.argv]), Path(entry.path).name)
    _use(Programs(connection))
    return entry.load()


def _use(programs: Programs) -> None:
    """Let a server fork the programs that Flower starts in this process."""
    replacement = Subprocess(programs)
    for name in _STARTERS:
        module = sys.modules.get(name)
        if isinstance(getattr(module, "subprocess", None), types.ModuleType):
            module.subprocess = replacement  # type: ignore[union-attr]


class NoEntryError(Exception):
    """Raised if a command does not belong to this Python environment, or not to Flower."""


@dataclass(frozen=True)
class ProgramEntry:
    """The function that a command runs."""

    path: str  # script of the command
    module: str
    function: str

    def load(self) -> Callable[[], Any]:
        """Import the module and return the function."""
        value: Any = importlib.import_module(self.module)
        for name in self.function.split("."):
            value = getattr(value, name)
        return value  # type: ignore[no-any-return]


def find(name: str, environ: Mapping[str, str]) -> ProgramEntry:
    """Return the entry of the first command with this name on the ``PATH`` of an environment.

    Raises NoEntryError if the function of that command is not known.
    """
    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    if path is None:
        raise NoEntryError(f"there is no command {name}")
    folder, name = Path(path).parent, Path(path).name
    for commands in (COMMANDS, SERVER_COMMANDS, flowers()):
        if name in commands and folder == CommandFolder(commands).path:
            return ProgramEntry(path, *function_of(commands[name]))
    if name not in flowers() or folder not in map(Path, script_folders()):
        raise NoEntryError(f"{path} is another program")
    return ProgramEntry(path, *function_of(flowers()[name]))
