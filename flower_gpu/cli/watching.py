"""``flower-gpu top``, ``report`` and ``metrics``: views of runs and GPUs."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from flower_gpu.cli.arguments import Command, reader
from flower_gpu.errors import ConfigError
from flower_gpu.kinds import FOLDER, INTERVAL, PORT_OR_0, SWITCH, TEXT
from flower_gpu.options import RESERVE, Option
from flower_gpu.printable import path_text

if TYPE_CHECKING:
    from flower_gpu.watch.followed_run import FollowedRuns

# The modules of these commands are imported when they run, because no other command needs them.

#: Seconds for which a run is still shown after its end, with its outcome.
_ENDED_SHOWN_S: Final = 10.0


def _top(arguments: argparse.Namespace) -> int:
    from flower_gpu.gpu import inventory
    from flower_gpu.watch.followed_run import FollowedRuns

    # The encoding of the output may not have all characters.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if arguments.run_dir is not None and not arguments.run_dir.is_dir():
        raise ConfigError(
            f"{path_text(arguments.run_dir)} is not the folder of a run, which has a trace.jsonl in it"
        )
    runs = FollowedRuns(_ENDED_SHOWN_S, only=arguments.run_dir)
    try:
        if arguments.json or arguments.once:
            return _once(runs, as_json=arguments.json)
        if not _has_screen():
            print(
                "flower-gpu top: stdin or stdout is not a terminal, so this shows the state once (--once); "
                "over ssh, use ssh -t",
                file=sys.stderr,
            )
            return _once(runs, as_json=False)
        from flower_gpu.watch.top import terminal

        return terminal.run(runs, arguments.interval)
    finally:
        inventory.close()


def _once(runs: FollowedRuns, *, as_json: bool) -> int:
    from flower_gpu.watch.top.snapshot import take_snapshot

    shown = runs.look()
    runs.read_on(math.inf)
    snapshot = take_snapshot(shown, others=runs.are_all)
    if as_json:
        print(json.dumps(snapshot.as_json(), indent=2))
        return 0
    from flower_gpu.watch.top.view import Size, draw

    for line in draw(snapshot, Size(shutil.get_terminal_size().columns)):
        print(line.plain.rstrip())
    return 0


def _has_screen() -> bool:
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    return is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def _report(arguments: argparse.Namespace) -> int:
    from flower_gpu.watch.report.page import write_report

    print(path_text(write_report(arguments.run_dir, arguments.output)))
    return 0


def _metrics(arguments: argparse.Namespace) -> int:
    from flower_gpu.watch.host_look import look_at_host
    from flower_gpu.watch.metrics import MUTEX_WAIT_S, Collector, serve

    look = partial(look_at_host, MUTEX_WAIT_S, RESERVE.resolve(None, os.environ))
    return serve(Collector(look), arguments.address, arguments.port)


TOP: Final = Command(
    "watch GPUs, workers and the queue for leases during runs",
    """\
Show this host's GPUs and their leases, this account's runs and their progress, the workers of these runs, and
the requests that wait for a lease, twice a second. Keys sort and scroll; q or Ctrl-C ends it. It changes
nothing.""",
    _top,
    {
        "interval": Option(
            "seconds between two updates (default: {default}, 0.1 or more)", INTERVAL, default=0.5
        ),
        "once": Option("print the state once as plain text, and exit", SWITCH),
        "json": Option("print the state once as JSON, and exit", SWITCH),
    },
    add=lambda parser: _add_folder(parser, "show the run of this folder only", nargs="?"),
)
REPORT: Final = Command(
    "write a page about a run, with pictures of its GPUs and its workers",
    """\
Write a report about a run, from its trace: GPU memory and leases over time, workers, sums, and tables of
rounds and clients. It is one HTML file that needs no network. The run may be over, running, or have been
killed.""",
    _report,
    {
        "output": Option(
            "file to write the report to (default: RUN_DIR/report.html)", replace(FOLDER, metavar="FILE")
        ),
    },
    add=lambda parser: _add_folder(parser, "folder of the run"),
)
METRICS: Final = Command(
    "serve figures of GPUs, leases and runs for Prometheus",
    """\
Serve figures for Prometheus over HTTP until Ctrl-C: this host's GPUs, the leases on them, and this account's
runs. Each request gets the current figures. It changes nothing.

    flower-gpu metrics
    curl http://127.0.0.1:9460/metrics""",
    _metrics,
    {
        "port": Option("port to listen on; 0: a free one (default: {default})", PORT_OR_0, default=9460),
        "address": Option(
            "address of this host to listen on (default: {default}, which other hosts cannot reach)",
            replace(TEXT, metavar="HOST"),
            default="127.0.0.1",
        ),
    },
    outlives_output=True,
)


def _add_folder(parser: argparse.ArgumentParser, help: str, nargs: str | None = None) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs=nargs, type=reader(FOLDER), help=help)
