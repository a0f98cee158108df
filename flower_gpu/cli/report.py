"""``flower-gpu report``: a page about a run, with pictures of what its GPUs and workers did."""

from __future__ import annotations

import argparse
from pathlib import Path

from flower_gpu.printable import path_text

HELP = "write a page about a run: what its GPUs, workers and rounds did"
DESCRIPTION = """\
Write a report about a run, from its trace: GPU memory and leases over time, workers, metrics by round, sums,
and a table of clients. It is one HTML file that needs no network. The run may be over, go on, or have been
killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="where the report goes (default: RUN_DIR/report.html)"
    )
    parser.add_argument(
        "--png",
        action="store_true",
        help="write each picture as a PNG, too, into a folder that is named like the report",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Here: matplotlib takes a second.
    from flower_gpu.watch.report.page import write_report

    print(path_text(write_report(arguments.run_dir, arguments.output, arguments.png)))
    return 0
