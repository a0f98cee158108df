"""``flower-gpu report``: a page about a run, with pictures of its GPUs and its workers."""

from __future__ import annotations

import argparse
from pathlib import Path

from flower_gpu.printable import path_text

HELP = "write a page about a run: what its GPUs, workers and rounds did"
DESCRIPTION = """\
Write a report about a run, from its trace: GPU memory and leases over time, workers, sums, and tables of
rounds and clients. It is one HTML file that needs no network. The run may be over, go on, or have been
killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="where the report goes (default: RUN_DIR/report.html)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Here: it is for this command only.
    from flower_gpu.watch.report.page import write_report

    print(path_text(write_report(arguments.run_dir, arguments.output)))
    return 0
