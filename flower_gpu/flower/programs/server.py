"""The process that has Flower imported, and forks a program for each request."""

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
from flower_gpu.flower.commands import (
    COMMANDS,
    SERVER_COMMANDS,
    CommandFolder,
    flowers,
    function_of,
)
from flower_gpu.flower.programs.starter import CONNECTION_VARIABLE, Programs, Subprocess
from flower_gpu.workers import interpreter, messages
from flower_gpu.workers.forkserver import identity
from flower_gpu.workers.forkserver.forking import Become, ChildWatch
from flower_gpu.workers.forkserver.identity import script_folders
from flower_gpu.workers.life import explained
from flower_gpu.workers.own_process import facts

# What Flower's programs import, also when they are used for the first time. One that another version of
# Flower does not have is left out: who needs something else imports it.
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
    "flower_gpu.flower.clientapp",
    "flower_gpu.flower.flwr_clientapp",
    "flower_gpu.flower.serverapp",
    "flower_gpu.flower.superexec",
    "flower_gpu.flower.supernode",
)
# Modules of Flower's that start programs of Flower's, by ``subprocess.Popen``.
_STARTERS: Final = (
    "flwr.superlink.cli.flower_superlink",
    "flwr.supercore.superexec.executor.subprocess_executor",
    "flwr.supernode.start_client_internal",
)
# Runs the ServerApp. Other programs multiply no matrices, and threads that wait for that cost time.
_COMPUTES: Final = "flwr-serverapp"
_MOMENT_S: Final = 0.001
# Variables that Python, its libraries or Flower read when they start or are imported.
_READ_AT_START: Final = ("FLWR_", "GRPC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON", "TZ")


# How programs end that were not asked to.
_KILLED: Final = tuple(
    -number for number in signal.valid_signals() - {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
)


def read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program reads when it starts: a fork has them from its server."""
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


def main() -> NoReturn:
    """Be the server that the environment says; forks of it become programs."""
    connection = socket.socket(fileno=int(os.environ.pop(CONNECTION_VARIABLE)))
    connection.set_inheritable(False)
    _serve(connection, _MODULES, read_at_start(os.environ))


def fork_own(modules: Iterable[str]) -> None:
    """Have the programs that Flower starts in this one forked by a fork of it, from now on.

    To be called before there are threads; does nothing in a fork of a server, which has one. ``modules`` are
    what those programs import.
    """
    if sys.platform != "linux" or facts.is_program or threading.active_count() > 1:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.setpgid(0, 0)  # out of reach of a terminal's Ctrl-C
        _serve(theirs, modules, read_at_start(os.environ))
    theirs.close()
    _use(Programs(ours))


def _serve(connection: socket.socket, modules: Iterable[str], started_with: Mapping[str, str]) -> NoReturn:
    """Fork programs for the process at the other end of the connection, until it closes that.

    ``started_with``: the variables of :func:`read_at_start` that this process was started with.
    """
    # The title of a fork stays where the arguments were: beyond is what guard.py finds processes by.
    os.environ["SPT_NOENV"] = "1"
    _be_shown_as("flower-gpu: Flower's programs")
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    with suppress(OSError):
        identity.server_name(os.environ, (), ())  # each message asks for it, of files that are looked at once
    httpx.Client(verify=False).close()  # the first one has OpenSSL take 10 MB, which forks share from here
    gc.collect()
    gc.freeze()  # the collector of a fork would touch, and so copy, every object
    try:
        _ProgramForker(connection, started_with).run()
        os._exit(0)
    except Become as fork:
        become = fork.work
    interpreter.run_to_end(become())


def _be_shown_as(command: str, name: str | None = None) -> None:
    """Have ``ps`` show this process with a command line and a name, where setproctitle is installed."""
    with suppress(ImportError):  # some hosts are given packages one by one
        import setproctitle

        setproctitle.setproctitle(encodable(command))
        if name is not None:
            setproctitle.setthreadtitle(name)


@dataclass(frozen=True)
class _ProgramRequest:
    """One program to start; the fields of the message, and the descriptors that came with it."""

    argv: list[str]
    env: dict[str, str]
    #: Its process group; 0: one of its own, None: a session of its own.
    group: int | None
    streams: list[int]  # standard input, output, error
    folder: int
    answer: socket.socket  # where the process id goes, and the status when it has ended
    kept: list[int] = field(default_factory=list)  # open in the program, for as long as it is there

    @classmethod
    def of(cls, message: Mapping[str, Any], descriptors: list[int]) -> _ProgramRequest:
        stdin, stdout, stderr, folder, answer, *kept = descriptors
        return cls(
            message["argv"],
            message["env"],
            message["group"],
            [stdin, stdout, stderr],
            folder,
            socket.socket(fileno=answer),
            kept,
        )

    def hand_over(self) -> None:
        """Let go of what the program has now, but for the log, its standard error."""
        for descriptor in (*self.streams[:2], self.folder, *self.kept):
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the rest."""
        os.close(self.streams[2])
        self.answer.close()

    def note_end(self, status: int) -> None:
        """Tell who waits how the program has ended, and where it wrote to if it could not say it itself."""
        self.say({"status": status})
        if status in _KILLED:
            how = f"was killed by {signal.Signals(-status).name} ({-status})"
            with suppress(OSError):
                os.write(self.streams[2], f"flower-gpu: {self.argv[0]} {how}\n".encode())
        self.close()

    def say(self, answer: Mapping[str, Any]) -> None:
        with suppress(messages.Gone):  # nobody asks any more
            messages.send(self.answer, answer)


class _ProgramForker:
    def __init__(self, connection: socket.socket, started_with: Mapping[str, str]) -> None:
        self._started_with = MappingProxyType(dict(started_with))
        self._first = connection
        self._running: dict[int, _ProgramRequest] = {}  # by process id
        self._has_ended = False
        self._children = ChildWatch(self._on_child)
        self._selector = self._children.selector

    def run(self) -> None:
        """Serve until the first connection is closed; Become in a fork."""
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
            if messages.is_closed(request.answer):  # it was started in another way meanwhile
                raise NoEntryError("nobody waits for it any more")
            found = find(request.argv[0], request.env)
            if read_at_start(request.env) != self._started_with:
                raise NoEntryError("its environment has other variables that are read at the start")
            self._fork(request, found)
            return
        except NoEntryError as error:
            request.say({"refused": str(error)})
        except OSError as error:
            request.say({"refused": explained(error)})
        request.hand_over()
        request.close()

    def _fork(self, request: _ProgramRequest, found: ProgramEntry) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._leave()
            request.answer.detach()  # it stays open: who waits sees its end, also where this server has ended
            raise Become(partial(_become, found, request, theirs))
        theirs.close()
        if request.group == 0:
            with suppress(OSError):  # who asked may wait for the end of the group from now on
                os.setpgid(pid, pid)
        self._watch(ours)
        self._running[pid] = request
        request.hand_over()
        request.say({"pid": pid})

    def _leave(self) -> None:
        """Let go of all this, in a fork."""
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


# In the fork: it becomes a program, as of a fresh interpreter, but for what is imported already


def _become(found: ProgramEntry, request: _ProgramRequest, connection: socket.socket) -> Callable[[], Any]:
    """Take on what a program is started with, in a new fork; return its function.

    ``connection``: over which it has programs started itself.
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
    computes = Path(found.path).name == _COMPUTES
    of_threads = interpreter.with_all_cores(os.environ) if computes else os.environ
    interpreter.begin([found.path, *request.argv[1:]], request.streams, of_threads)
    _be_shown_as(" ".join([sys.executable, *sys.argv]), Path(found.path).name)
    _use(Programs(connection))
    return found.load()


def _use(programs: Programs) -> None:
    """Have the programs that Flower starts in this process forked by a server."""
    replacement = Subprocess(programs)
    for name in _STARTERS:
        module = sys.modules.get(name)
        if isinstance(getattr(module, "subprocess", None), types.ModuleType):
            module.subprocess = replacement  # type: ignore[union-attr]


class NoEntryError(Exception):
    """A command is none of this Python environment's, or not one of Flower's."""


@dataclass(frozen=True)
class ProgramEntry:
    """What a command runs."""

    path: str  # its script
    module: str
    function: str

    def load(self) -> Callable[[], Any]:
        """Import it."""
        found: Any = importlib.import_module(self.module)
        for name in self.function.split("."):
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]


def find(name: str, environ: Mapping[str, str]) -> ProgramEntry:
    """Return what the command of this name runs that is first on the ``PATH`` of an environment.

    Raises NoEntryError if it is not known what that does.
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
