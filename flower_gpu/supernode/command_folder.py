"""The folder that goes first on ``PATH``, with our commands of Flower's names in it."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flower_gpu import config
from flower_gpu.errors import ConfigError
from flower_gpu.isolation.forkserver import identity, sockets
from flower_gpu.printable import path_text
from flower_gpu.supernode.rule import Rule

#: What is in it, by the module with its ``main``.
COMMANDS: Final = MappingProxyType(
    {
        "flwr-clientapp": "flower_gpu.supernode.flwr_clientapp",
        "flower-supernode": "flower_gpu.flower.supernode",
    }
)

_MOST_QUESTIONS_PER_S: Final = 40.0  # to a SuperLink that may be on this host as well

_STARTER = """\
#!/bin/sh
exec {interpreter} {program} "$@"
"""
_PROGRAM = """\
import sys; sys.path[:] = {path}
from {module} import main; main()
"""


class CommandFolder:
    """The folder of this Python environment: its commands use the interpreter that made them.

    Parameters
    ----------
    commands : mapping
        What is in it, by the module with its ``main``.

    Attributes
    ----------
    path : Path
        Where it is.

    Raises
    ------
    ConfigError
        If the state folder cannot be used.
    """

    def __init__(self, commands: Mapping[str, str] = COMMANDS) -> None:
        self._commands = commands
        interpreter = shlex.join([sys.executable, *identity.interpreter_flags()])
        path = ascii([entry for entry in sys.path if entry])
        texts = {name: _PROGRAM.format(path=path, module=module) for name, module in commands.items()}
        name = hashlib.sha256(repr((interpreter, texts)).encode()).hexdigest()[:20]
        self.path = sockets.folder() / "commands" / name
        # The program beside its starter, under the same name: that is what is seen of a process.
        programs = self.path / "python"
        self._files = {programs / name: text for name, text in texts.items()}
        for name in texts:
            program = shlex.quote(str(programs / name))
            self._files[self.path / name] = _STARTER.format(interpreter=interpreter, program=program)

    def make(self) -> Path:
        """Make what is missing of it; returns its path.

        Raises
        ------
        ConfigError
            If that cannot be done.
        """
        if all(path.exists() for path in self._files):
            return self.path
        try:
            for folder in (sockets.folder() / "commands", self.path, self.path / "python"):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path, text in self._files.items():
                if not path.exists():
                    new = path.with_name(f"{path.name}.{os.getpid()}")
                    new.write_text(text)
                    new.chmod(0o700)
                    new.replace(path)  # others may be about to start it
        except OSError as error:
            raise ConfigError(f"{path_text(self.path)} cannot be made: {error}") from error
        return self.path

    def first_on(self, path: str | None) -> str:
        """Make what is missing of it; returns a ``PATH`` by which these commands are found first.

        Raises
        ------
        ConfigError
            If they would not be found, or cannot be made.
        """
        folder = self.make()
        path = os.pathsep.join([str(folder), path or os.defpath])
        for command in self._commands:
            # Else Flower's own would be found, later on the path, and messages would have no lease.
            if shutil.which(command, path=path) != str(folder / command):
                raise ConfigError(
                    f"no command can be started in {path_text(folder)}: it is on a file system without "
                    f"exec, or its name has a {os.pathsep!r}. Set FLOWER_GPU_STATE_DIR to another folder of "
                    "this user"
                )
        return path


def fast_start(env: Mapping[str, str], rule: Rule, nodes: int = 1) -> dict[str, str]:
    """Return an environment in which ``flower-supernode`` is ours, and starts our ``flwr-clientapp``.

    Parameters
    ----------
    env : mapping
        The environment without that.
    rule : Rule
        What is to be done for each message.
    nodes : int
        How many SuperNodes there will be on this host.

    Raises
    ------
    ConfigError
        If our commands would not be found, or ``FLOWER_GPU_POLL_S`` is no number.
    """
    poll_s = config.poll_s(env)
    if config.POLL_VARIABLE not in env:
        poll_s = max(poll_s, nodes / _MOST_QUESTIONS_PER_S)
    path = CommandFolder().first_on(env.get("PATH"))
    return {**env, **rule.environment(), config.POLL_VARIABLE: f"{poll_s:g}", "PATH": path}
