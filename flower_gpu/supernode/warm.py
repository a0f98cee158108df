"""Have the fork server ready, with Flower imported, before the first message comes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from flower_gpu.errors import FlowerGPUError
from flower_gpu.isolation.forkserver import identity

# What our flwr-clientapp runs, with what Flower imports there when it is used, and the part of PyTorch that
# its optimizers import at their first step, which takes seconds.
_MODULES = (
    "flower_gpu.flower.clientapp",  # left out where it is not an installed package: it may be edited
    "flwr.supernode.cli",
    "flwr.clientapp",
    "flwr.compat.common.recorddict_compat",
    "httpcore",
    "torch._dynamo",
)


def up() -> None:
    """Start it where there is none, and have it import what each message needs.

    A failure is not told here: the first message meets it as well.
    """
    from flower_gpu.isolation.forkserver import client

    if client.is_supported():
        with suppress(FlowerGPUError):
            client.learn(_MODULES)


def command() -> list[str]:
    """Build the command line of a program that does that."""
    path = [entry for entry in sys.path if entry]
    program = f"import sys; sys.path[:] = {path!r}; from flower_gpu.supernode.warm import up; up()"
    return [sys.executable, *identity.interpreter_flags(), "-c", program]


def in_background(env: Mapping[str, str]) -> None:
    """Do that in a process of its own, which the caller's program need not know."""
    with suppress(OSError):
        # Twice removed: a program that replaces this one would have to reap it.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *command()],
            stdin=subprocess.DEVNULL,
            env=env,
            check=False,
        )
