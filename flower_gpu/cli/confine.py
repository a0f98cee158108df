"""Option ``--confine`` of ``flower-gpu supernode``, for operators who run other people's apps."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from flower_gpu.errors import ConfigError
from flower_gpu.kinds import FOLDERS, PORTS, words
from flower_gpu.options import Option, flag
from flower_gpu.programs import confine
from flower_gpu.programs.confine import Allowed
from flower_gpu.workers import confinement

_GROUP: Final = "confinement"
_STRICT: Final = "strict"

OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        "confine": Option(
            "have the kernel deny apps other files, TCP and processes; strict: refuse to run if it cannot "
            "do all of that",
            words("on", _STRICT),
            group=_GROUP,
            alone="on",
        ),
        "data_dir": Option("folder that apps can read; may be repeated", FOLDERS, group=_GROUP),
        "write_dir": Option("folder that apps can write to, too; may be repeated", FOLDERS, group=_GROUP),
        "allow_connect": Option(
            "TCP port to which apps can connect, on any host; may be repeated", PORTS, group=_GROUP
        ),
    }
)
GROUPS: Final = MappingProxyType(
    {
        _GROUP: "For apps that you have not written. An app can read the system's libraries, the Python\n"
        "environment and its own files, and write into a folder that is removed after the message."
    }
)


def environment(
    arguments: argparse.Namespace, keys: Iterable[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that confine apps in the processes of messages, if any.

    ``arguments``: parsed arguments with :data:`OPTIONS`.
    ``keys``: files of the SuperNode that apps must not read.
    ``environ``: environment of the SuperNode.

    Raises ConfigError if an option cannot be used, or this host cannot confine apps as requested.
    """
    allowed = _allowed(arguments)
    if arguments.confine is None:
        if allowed != Allowed():
            named = next(flag(name) for name in OPTIONS if getattr(arguments, name))
            raise ConfigError(f"{named} needs --confine: without it apps have all rights of this account")
        return {}
    if reason := confinement.problem():
        raise ConfigError(f"--confine: apps cannot be confined on this host: {reason}")
    if arguments.confine == _STRICT and (missing := confinement.not_refused(with_ports=bool(allowed.ports))):
        raise ConfigError(
            f"--confine=strict: this kernel does not refuse {'; '.join(missing)}. Use another host, "
            "or --confine on, which leaves that open"
        )
    allowed.check(keys, environ)
    return allowed.environment()


def describe(arguments: argparse.Namespace) -> list[str]:
    """Return lines about the confinement of apps, and its gaps."""
    if arguments.confine is None:
        return []
    allowed = _allowed(arguments)
    also = [f"read {path}" for path in allowed.read] + [f"write {path}" for path in allowed.write]
    also += [f"connect to port {port}" for port in allowed.ports]
    return [
        f"apps are confined{'; they may also ' if also else ''}{', '.join(also)}. What is not refused:",
        *(f"  - {gap}" for gap in confine.not_enforced(allowed)),
    ]


def _allowed(arguments: argparse.Namespace) -> Allowed:
    # Links are resolved now, so that an app cannot change their targets later.
    read, write = (tuple(map(os.path.realpath, paths)) for paths in (arguments.data_dir, arguments.write_dir))
    return Allowed(read, write, tuple(arguments.allow_connect))
