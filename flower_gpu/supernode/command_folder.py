"""The folder that goes first on a SuperNode's ``PATH``, with our ``flwr-clientapp`` in it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from flower_gpu.isolation.forkserver import identity, sockets
from flower_gpu.supernode.rule import Rule

COMMAND = "flwr-clientapp"

_PROGRAM = "import sys; sys.path[:] = {path}; from flower_gpu.supernode.flwr_clientapp import main; main()"


def make() -> Path:
    """Return the folder; made where it is missing.

    There is one for each Python environment of this user: the command uses the interpreter that made it.

    Raises
    ------
    ConfigError
        If the state folder cannot be used.
    """
    program = _PROGRAM.format(path=json.dumps([entry for entry in sys.path if entry]))
    command = [sys.executable, *identity.interpreter_flags(), "-c", program]
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    name = hashlib.sha256(text.encode()).hexdigest()[:20]
    folder = sockets.folder() / "commands" / name
    path = folder / COMMAND
    if not path.exists():
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
        new = folder / f"{COMMAND}.{os.getpid()}"
        new.write_text(text)
        new.chmod(0o700)
        new.replace(path)  # others may be about to start it
    return folder


def fast_start(env: Mapping[str, str], rule: Rule) -> dict[str, str]:
    """Return an environment in which SuperNodes start our ``flwr-clientapp``."""
    path = os.pathsep.join([str(make()), env.get("PATH", os.defpath)])
    return {**env, **rule.environment(), "PATH": path}
