"""Have the fork server ready, with Flower imported, before the first message comes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from flower_gpu.errors import FlowerGPUError
from flower_gpu.isolation.forkserver import client, identity

# What our flwr-clientapp runs, and the part of PyTorch that its optimizers import at their first step, which
# takes seconds.
_MODULES = ("flwr.supernode.cli", "flwr.clientapp", "torch._dynamo")


def up() -> None:
    """Start it where there is none, and have it import what each message needs.

    A failure is not told here: the first message meets it as well.
    """
    if client.is_supported():
        with suppress(FlowerGPUError):
            client.learn(_MODULES)


def in_background(env: Mapping[str, str]) -> None:
    """Do that in a process of its own, which the caller's program need not know."""
    path = [entry for entry in sys.path if entry]
    program = f"import sys; sys.path[:] = {path!r}; from flower_gpu.supernode.warm import up; up()"
    # Twice removed: a program that replaces this one would have to reap it.
    shell = [sys.executable, *identity.interpreter_flags(), "-c", program]
    with suppress(OSError):
        subprocess.run(
            ["/bin/sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *shell],
            stdin=subprocess.DEVNULL,
            env=env,
            check=False,
        )
