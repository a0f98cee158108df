"""What a process per call costs: flower-gpu and the other ways, side by side in one run.

Three parts: the time of one call (``calls``), that of a fit of a real client (``client``), and the memory of
clients that wait (``memory``). See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import calls
import client
import idle
import machine
import table
from options import EXIT_USAGE, Parser, chosen, json_file, positive, sizes_mb
from processes import BenchmarkError, end_descendants, nothing_left_behind
from ways import WAYS, usable

SIZES_MB = [0.25, 45.0, 500.0]


def main() -> int:
    options = _options()
    if left_out := WAYS.keys() - usable():
        print(f"not installed and left out: {', '.join(sorted(left_out))}", file=sys.stderr)
    if sys.platform != "linux":
        print("isolation.py needs Linux: it reads memory from /proc", file=sys.stderr)
        return EXIT_USAGE
    result: dict[str, Any] = {"machine": machine.describe(), **{part: [] for part in _PARTS}}
    try:
        with nothing_left_behind():
            for part in options.only:
                _PARTS[part](options, result)
                end_descendants()  # fork servers would be counted with the next part
    except BenchmarkError as error:
        print(f"isolation.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _calls(options: argparse.Namespace, result: dict[str, Any]) -> None:
    for size_mb in options.sizes:
        rows = calls.measure(size_mb, options.ways, options.runs, warm=not options.quick)
        table.show_calls(rows)
        result["calls"] += rows


def _client(options: argparse.Namespace, result: dict[str, Any]) -> None:
    measure = client.measure_quickly if options.quick else client.measure
    result["client"] = measure(options.ways)
    table.show_client(result["client"])


def _memory(options: argparse.Namespace, result: dict[str, Any]) -> None:
    measure = idle.measure_quickly if options.quick else idle.measure
    result["memory"] = measure(options.ways)
    table.show_memory(result["memory"])


_PARTS = {"calls": _calls, "client": _client, "memory": _memory}


def _options() -> argparse.Namespace:
    known = usable()
    parts = list(_PARTS)
    parser = Parser(prog="isolation.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--sizes", type=sizes_mb, metavar="MB,MB", help="weights in MB; default: 0.25,45,500")
    add("--ways", type=partial(chosen, known), default=known, metavar="WAY,WAY",
        help=f"some of {', '.join(known)}; default: all")  # fmt: skip
    add("--runs", type=positive, metavar="N", help="timed runs of each way; default: by size and way")
    add("--json", type=json_file, metavar="FILE", help="also write the figures there")
    add("--only", type=partial(chosen, parts), default=parts, metavar="PART",
        help=f"some of {', '.join(parts)}; default: all")  # fmt: skip
    add("--quick", action="store_true", help="tiny: shows that everything runs, the figures mean nothing")
    options = parser.parse_args()
    if options.sizes is None:
        options.sizes = [0.1] if options.quick else SIZES_MB
    if options.runs is None and options.quick:
        options.runs = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
