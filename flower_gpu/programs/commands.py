"""Our commands with Flower's names, and the ``PATH`` on which Flower finds them.

::

    flower-gpu supernode, flower-gpu launch
      │  PATH begins with the folder of our commands; FLOWER_GPU_SUPERNODE is "lease" or "start" (here)
      ▼
    flower-supernode: Flower's program, which waits less between two messages (supernode.py)
      │  Flower starts a "flower-superexec" for it, by its name
      ▼
    flower-superexec: Flower's program, woken for each message instead of polling for it (superexec.py)
      │  Flower starts a "flwr-clientapp" for each message, by its name
      ▼
    flwr-clientapp: asks the host's fork server for a child, and waits for it (flwr_clientapp.py)
      │  with "lease" and as a fork of a process with Flower (programs/), it does the child's work itself
      ▼
    the child, with Flower imported already: Flower's flwr-clientapp, which pulls the message from the
      │  SuperNode and pushes the reply (clientapp.py)
      ├── "start", for apps in which launch finds gpu_mod or GPUClient: the child loads and runs the app, and
      │     the app takes leases through gpu_mod or GPUClient
      └── "lease": the child waits for a lease
            ▼
          a worker, which loads and runs the app; no app can avoid that
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flower_gpu import files, frameworks
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.options import POLL
from flower_gpu.printable import path_text
from flower_gpu.programs import waits
from flower_gpu.programs.flwr_clientapp import RULE_VARIABLE, TASK, WITHOUT_LEASE
from flower_gpu.workers.forkserver import client, identity, sockets
from flower_gpu.workers.forkserver.identity import script_folders

#: Our commands by name, each with the module of its ``main``.
COMMANDS: Final = MappingProxyType(
    {
        "flwr-clientapp": "flower_gpu.programs.flwr_clientapp",
        "flower-supernode": "flower_gpu.programs.supernode",
        "flower-superexec": "flower_gpu.programs.superexec",
    }
)

#: The SuperLink of ``flower-gpu launch``, and the commands that it finds in place of Flower's own.
SERVER_COMMANDS: Final = MappingProxyType(
    {
        "flower-superlink": "flower_gpu.programs.superexec:superlink",
        "flower-superexec": "flower_gpu.programs.superexec",
        "flwr-serverapp": "flower_gpu.programs.serverapp",
    }
)

# Limit for polls of a SuperLink by all SuperNodes of this host together, because the SuperLink may run on
# this host as well. Rare polls do not delay a round much, because a SuperNode that gets a message wakes the
# others (waits.py).
_MOST_QUESTIONS_PER_S: Final = 10.0

# Modules that the fork server imports before the first message: the modules of our flwr-clientapp, and
# modules that Flower and PyTorch import at their first use.
_MODULES: Final = (
    "flower_gpu.programs.clientapp",
    "flwr.supernode.cli",
    "flwr.clientapp",
    "flwr.compat.common.recorddict_compat",
    "httpcore",
    *frameworks.imported_in_use("torch"),
)

_STARTER = """\
#!/bin/sh
exec {interpreter} {program} "$@"
"""
_PROGRAM = """\
import sys; sys.path[:] = {path}
from {module} import {function} as main; sys.exit(main())
"""


@cache
def flowers() -> Mapping[str, str]:
    """Return the entry points of Flower's own commands: ``module:function`` by name.

    The scripts of the commands are not used, because they may not be in the interpreter's folder. For
    example, ``pip install --target`` installs them elsewhere.
    """
    scripts = entry_points(group="console_scripts")
    return {entry.name: entry.value for entry in scripts if entry.module.partition(".")[0] == "flwr"}


def function_of(reference: str) -> tuple[str, str]:
    """Return the module and the function of a ``module:function``. The default function is ``main``."""
    module, _, function = reference.partition(":")
    return module, function or "main"


class CommandFolder:
    """The folder of this Python environment's commands, which goes first on ``PATH``.

    The commands run with the interpreter of the process that made the folder.

    ``commands``: the module of each command, or its ``module:function``, by name.

    Raises ConfigError if the state folder cannot be used.
    """

    def __init__(self, commands: Mapping[str, str] = COMMANDS) -> None:
        self._commands = commands
        interpreter = shlex.join([sys.executable, *identity.interpreter_flags()])
        path = ascii([entry for entry in sys.path if entry])
        functions = {name: function_of(reference) for name, reference in commands.items()}
        texts = {
            name: _PROGRAM.format(path=path, module=module, function=function)
            for name, (module, function) in functions.items()
        }
        name = hashlib.sha256(repr((interpreter, texts)).encode()).hexdigest()[:20]
        self.path = sockets.folder() / "commands" / name
        # The program has the same file name as its starter, because process lists show this name.
        programs = self.path / "python"
        self._files = {programs / name: text for name, text in texts.items()}
        for name in texts:
            program = shlex.quote(str(programs / name))
            self._files[self.path / name] = _STARTER.format(interpreter=interpreter, program=program)

    def make(self) -> Path:
        """Return the path of the folder, after making its missing parts. Raises ConfigError if that fails."""
        if all(path.exists() for path in self._files):
            return self.path
        try:
            for folder in (sockets.folder() / "commands", self.path, self.path / "python"):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path, text in self._files.items():
                if not path.exists():
                    # The file is written under another name, because another process may start it already.
                    with files.replaced(path, mode=0o700) as new:
                        new.write_text(text)
        except OSError as error:
            raise ConfigError(f"{path_text(self.path)} cannot be made: {error}") from error
        return self.path

    def first_on(self, path: str | None) -> str:
        """Return a ``PATH`` that begins with the folder, after making its missing parts.

        Raises ConfigError if the folder cannot be made, or if its commands would not be found.
        """
        folder = self.make()
        path = os.pathsep.join([str(folder), path or os.defpath])
        for command in self._commands:
            # If Flower's own command were found later on the path instead, messages would get no lease.
            if shutil.which(command, path=path) != str(folder / command):
                raise ConfigError(
                    f"no command can be started in {path_text(folder)}: it is on a file system without "
                    f"exec, or its name has a {os.pathsep!r}. Set FLOWER_GPU_STATE_DIR to another folder of "
                    "this user"
                )
        return path


def with_flowers(path: str | None) -> str:
    """Return a ``PATH`` that begins with the folders of Flower's and this Python environment's commands."""
    path = os.pathsep.join([*script_folders(), path or os.defpath])
    # If the folder cannot be made, the commands in the interpreter's folder are used, if they exist.
    with suppress(ConfigError):
        return CommandFolder(flowers()).first_on(path)
    return path


def fast_start(
    env: Mapping[str, str], *, with_lease: bool, nodes: int = 1, are_told: bool = False
) -> dict[str, str]:
    """Return an environment in which ``flower-supernode`` is ours, and starts our ``flwr-clientapp``.

    ``with_lease``: True acquires a lease for each message before any code of the app is imported.
    ``nodes``: number of SuperNodes on this host.
    ``are_told``: True if the ServerApp wakes these SuperNodes when it sends messages.

    Raises ConfigError if our commands would not be found, or if ``FLOWER_GPU_POLL_S`` is not a number.
    """
    seconds = POLL.resolve(None, env)
    if POLL.variable not in env:
        wanted_s = waits.LONGEST_S if are_told else nodes / _MOST_QUESTIONS_PER_S
        seconds = max(seconds, min(waits.LONGEST_S, wanted_s))
    return {
        **(waits.with_group(env, nodes) if nodes > 1 else env),
        RULE_VARIABLE: "lease" if with_lease else WITHOUT_LEASE,
        POLL.variable: f"{seconds:g}",
        "PATH": CommandFolder().first_on(env.get("PATH")),
    }


def warm_up(libraries: Sequence[str] = ()) -> None:
    """Start the fork server if it is not running, and let it import the libraries that every message needs.

    Messages wait for these imports, and need not import the libraries themselves. A failure is not reported
    here, because the first message will have the same failure.

    ``libraries``: names of the libraries that the app of this run imports.
    """
    if client.is_supported():
        with suppress(FlowerGPUError):
            names = [*_MODULES, *libraries]
            client.learn(names, patience_s=client.LEARN_FOR_LIMITED_S, tasks=[TASK])


def warm_up_command(libraries: Sequence[str] = ()) -> list[str]:
    """Return the command line of a program that calls :func:`warm_up`."""
    path = [entry for entry in sys.path if entry]
    program = (
        f"import sys; sys.path[:] = {path!r}; from flower_gpu.programs.commands import warm_up; "
        f"warm_up({list(libraries)!r})"
    )
    return [sys.executable, *identity.interpreter_flags(), "-c", program]


def warm_up_in_background(env: Mapping[str, str]) -> None:
    """Call :func:`warm_up` in another process, and return at once."""
    with suppress(OSError):
        # The shell starts the process and exits, so the process is not a child of this program. A program
        # that replaces this program with exec would not expect a child, and would not reap it.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *warm_up_command()],
            stdin=subprocess.DEVNULL,
            env=env,
            check=False,
        )
