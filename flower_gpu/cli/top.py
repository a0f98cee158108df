"""``flower-gpu top``: what runs on this host's GPUs now, again and again."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flower_gpu.errors import ConfigError
from flower_gpu.kinds import MAX_SECONDS, too_long

if TYPE_CHECKING:
    from flower_gpu.watch.top.watcher import Watcher

HELP = "watch GPUs, workers, the line for leases and rounds while they go on"
DESCRIPTION = """\
Shows, twice a second, this host's GPUs and who has how much of them, this account's runs and how far they
are, their workers and what each does, and who waits for a lease. Keys sort and scroll; q or Ctrl-C ends
it. It changes nothing."""

_INTERVAL_S: Final = 0.5
_LEAST_INTERVAL_S: Final = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", nargs="?", type=Path, help="show the run of this folder only"
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=float,
        default=_INTERVAL_S,
        help=f"seconds between two looks (default {_INTERVAL_S}, {_LEAST_INTERVAL_S} or more)",
    )
    parser.add_argument("--once", action="store_true", help="print one look as plain text, and end")
    parser.add_argument("--json", action="store_true", help="print one look as JSON, and end")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    interval_s = arguments.interval
    if not _LEAST_INTERVAL_S <= interval_s <= MAX_SECONDS:
        raise ConfigError(
            f"--interval {interval_s:g} must be {_LEAST_INTERVAL_S} seconds or more{too_long(interval_s)}"
        )
    # Late: what it needs is for this command only.
    from flower_gpu.watch.top.watcher import Watcher

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # what the output does not have
    watcher = Watcher(arguments.run_dir)
    try:
        if arguments.json or arguments.once:
            return _once(watcher, as_json=arguments.json)
        if not _has_screen():
            print(
                "flower-gpu top: the output is no terminal to draw on, so this is one look (--once); "
                "over ssh, use ssh -t",
                file=sys.stderr,
            )
            return _once(watcher, as_json=False)
        from flower_gpu.watch.top import terminal

        return terminal.run(watcher, interval_s)
    finally:
        watcher.close()


def _once(watcher: Watcher, *, as_json: bool) -> int:
    watcher.look_for_runs()
    watcher.read_on(math.inf)
    snapshot = watcher.take()
    if as_json:
        print(json.dumps(snapshot.as_json(), indent=2))
        return 0
    from flower_gpu.watch.top.view import Frame, plain_lines

    print(*plain_lines(Frame(snapshot, has_screen=False), shutil.get_terminal_size().columns), sep="\n")
    return 0


def _has_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
