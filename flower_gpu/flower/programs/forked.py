"""A fork of the server becomes a program: as a fresh interpreter, but for what is imported already."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any, Final

from flower_gpu.flower.programs import starter
from flower_gpu.flower.programs.entry import ProgramEntry
from flower_gpu.workers import interpreter

# Modules of Flower's that start programs of Flower's, by ``subprocess.Popen``.
_STARTERS: Final = (
    "flwr.superlink.cli.flower_superlink",
    "flwr.supercore.superexec.executor.subprocess_executor",
    "flwr.supernode.start_client_internal",
)
# Runs the ServerApp. Other programs multiply no matrices, and threads that wait for that cost time.
_COMPUTES: Final = "flwr-serverapp"


def become(
    found: ProgramEntry,
    argv: Sequence[str],
    env: Mapping[str, str],
    group: int | None,
    streams: Sequence[int],
    folder: int,
    connection: socket,
) -> Callable[[], Any]:
    """Take on what a program is started with, in a new fork; return its function.

    ``found``: the program.
    ``argv``: its name and arguments.
    ``env``: all its environment variables.
    ``group``: its process group; 0 for one of its own, None for a session of its own.
    ``streams``: descriptors of its standard input, output and error.
    ``folder``: descriptor of its working directory.
    ``connection``: over which it has programs started itself.
    """
    if group is None:
        os.setsid()
    else:
        with suppress(OSError):  # the group has ended
            os.setpgid(0, group)
    os.fchdir(folder)
    os.close(folder)
    os.environ.clear()
    os.environ.update(env)
    computes = Path(found.path).name == _COMPUTES
    of_threads = interpreter.with_all_cores(os.environ) if computes else os.environ
    interpreter.begin([found.path, *argv[1:]], streams, of_threads)
    be_shown_as(" ".join([sys.executable, *sys.argv]), Path(found.path).name)
    use(starter.Programs(connection))
    return found.load()


def be_shown_as(command: str, name: str | None = None) -> None:
    """Have ``ps`` show this process with a command line and a name, where setproctitle is installed."""
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(command)
        if name is not None:
            setproctitle.setthreadtitle(name)


def use(programs: starter.Programs) -> None:
    """Have the programs that Flower starts in this process forked by a server."""
    replacement = starter.Subprocess(programs)
    for name in _STARTERS:
        module = sys.modules.get(name)
        if isinstance(getattr(module, "subprocess", None), types.ModuleType):
            module.subprocess = replacement  # type: ignore[union-attr]
