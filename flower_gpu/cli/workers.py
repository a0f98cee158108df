"""``flower-gpu workers``: list this user's fork servers, or end them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from flower_gpu.cli.arguments import Command, is_quiet
from flower_gpu.workers.forkserver import control

_STOP_WAIT_S = 5.0


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", description="default: status")
    actions.add_parser(
        "status",
        help="list the fork servers of this user, what they have loaded and how many processes use them",
        allow_abbrev=False,
    )
    stop = actions.add_parser(
        "stop",
        help="end them; running calls finish, and the next call starts a new server",
        allow_abbrev=False,
    )
    stop.add_argument("--if-unused", action="store_true", help="only servers that no process may still use")


def run(arguments: argparse.Namespace) -> int:
    """List or end fork servers, and return the exit status."""
    if arguments.action == "stop":
        pids = control.stop(if_unused=arguments.if_unused, wait_s=_STOP_WAIT_S)
        running = control.still_running(pids)
        for pid in pids:
            print(f"fork server {pid} {'ends with its last worker' if pid in running else 'ended'}")
        if not pids:
            print("no fork server was ended" if arguments.if_unused else "no fork server is running")
        return 0
    servers = control.status()
    for status in servers:
        print(describe(status))
    if not servers and not is_quiet(arguments):
        print("no fork server is running", file=sys.stderr)
    return 0


def describe(status: control.Status) -> str:
    """Return a few lines of text about one fork server."""
    up = timedelta(seconds=round(status.uptime_s))
    counts = f"{_count(status.calls, 'call')}, {_count(len(status.workers), 'running', plural='running')}"
    lines = [
        f"fork server {status.pid}, up {up}, {status.memory_bytes / 1e6:.0f} MB: {counts}, "
        f"used by {_count(status.users, 'process', plural='processes')}",
        f"    python   {status.python} (flower-gpu {status.version})",
    ]
    for title, names in (
        ("learned", status.libraries),
        ("refused", status.refused),
        ("preload", status.preload),
        ("running", status.workers),
    ):
        if names:
            lines.append(f"    {title:8} {_joined(names)}")
    return "\n".join(lines)


def _count(number: int, word: str, plural: str | None = None) -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"


def _joined(names: Iterable[str], max_shown: int = 20) -> str:
    listed = list(names)
    rest = len(listed) - max_shown
    return ", ".join(listed[:max_shown]) + (f" and {rest} more" if rest > 0 else "")


COMMAND: Final = Command(
    "show or end the fork servers, from which workers are forked",
    """\
Workers are forked from a process that has imported torch and other libraries already: one for each user and
Python environment of this machine, shared by all clients. It is started with the first call, ends when it
has not been used for a while, and never touches a GPU.""",
    run,
    add=_add_actions,
)
