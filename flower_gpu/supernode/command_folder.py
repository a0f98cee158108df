"""The folder that goes first on ``PATH``, with our commands of Flower's names in it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flower_gpu import config
from flower_gpu.isolation.forkserver import identity, sockets
from flower_gpu.supernode.rule import Rule

#: What is in it, by the module with its ``main``.
COMMANDS: Final = MappingProxyType(
    {
        "flwr-clientapp": "flower_gpu.supernode.flwr_clientapp",
        "flower-supernode": "flower_gpu.flower.supernode",
    }
)

_MOST_QUESTIONS_PER_S: Final = 40.0  # to a SuperLink that may be on this host as well

# A shell script, for any interpreter with any options, that is a Python program, too: that begins with two
# strings.
_PROGRAM = """\
#!/bin/sh
'''exec' {interpreter} "$0" "$@"
' '''
import sys; sys.path[:] = {path}
from {module} import main; main()
"""


def make() -> Path:
    """Return the folder; made where it is missing.

    There is one for each Python environment of this user: the commands use the interpreter that made it.

    Raises
    ------
    ConfigError
        If the state folder cannot be used.
    """
    interpreter = shlex.join([sys.executable, *identity.interpreter_flags()])
    path = json.dumps([entry for entry in sys.path if entry])
    texts = {
        name: _PROGRAM.format(interpreter=interpreter, path=path, module=module)
        for name, module in COMMANDS.items()
    }
    folder = sockets.folder() / "commands" / hashlib.sha256(repr(texts).encode()).hexdigest()[:20]
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    for name, text in texts.items():
        if not (folder / name).exists():
            new = folder / f"{name}.{os.getpid()}"
            new.write_text(text)
            new.chmod(0o700)
            new.replace(folder / name)  # others may be about to start it
    return folder


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
        If the state folder cannot be used, or ``FLOWER_GPU_POLL_S`` is no number.
    """
    poll_s = config.poll_s(env)
    if config.POLL_VARIABLE not in env:
        poll_s = max(poll_s, nodes / _MOST_QUESTIONS_PER_S)
    path = os.pathsep.join([str(make()), env.get("PATH", os.defpath)])
    return {**env, **rule.environment(), config.POLL_VARIABLE: f"{poll_s:g}", "PATH": path}
