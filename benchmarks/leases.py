"""Leases under load, on GPUs that a stub of NVIDIA's library plays: no GPU is needed.

Three parts: many processes with random requests, of which a third is killed (``crowd``), one that has no
competition (``alone``), and many that wait (``waiting``). See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import table
from options import EXIT_USAGE, Parser, json_file, positive
from processes import BenchmarkError, Member, nothing_left_behind

TESTS = Path(__file__).resolve().parents[1] / "tests"
GPUS = 2
_PART_TIMEOUT_S = 600.0


def main() -> int:
    options = _options()
    if sys.platform != "linux":
        print("leases.py needs Linux: it reads /proc", file=sys.stderr)
        return EXIT_USAGE
    result: dict[str, Any] = {"machine": machine.describe(), "seed": options.seed}
    try:
        with nothing_left_behind(), tempfile.TemporaryDirectory(prefix="fgpu-bench-") as folder:
            _prepare(Path(folder))
            member = Member("leases", "lease_parts.py", options.seed)
            try:
                member.wait_until_ready()
                for part, arguments in {
                    "crowd": {"processes": options.processes},
                    "alone": {"runs": options.runs},
                    "waiting": {"waiters": options.waiters, "seconds": options.seconds},
                }.items():
                    figures = member.ask(_PART_TIMEOUT_S, part=part, **arguments)
                    table.show_figures(_TITLES[part].format(**arguments), figures)
                    result |= figures
            finally:
                member.close()
    except (BenchmarkError, RuntimeError) as error:
        print(f"leases.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    broken = result["over_capacity_instants"] or result["unfinished"] or result["left_over"]
    return 1 if broken else 0


_TITLES = {
    "crowd": "{processes} processes with random requests, a third of them killed",
    "alone": "acquire and release without competition, {runs} times",
    "waiting": "{waiters} processes that wait {seconds} s, then hold a GPU for 10 ms each",
}


def _prepare(folder: Path) -> None:
    """Make a stub host with a ledger of its own, for the processes that are started from here."""
    sys.path.insert(0, str(TESTS))
    from nvml_stub import Host

    host = Host(folder / "host", gpus=GPUS)
    ledger = folder / "ledger"
    ledger.mkdir()
    os.environ |= {**host.env, "FLOWER_GPU_LEDGER_DIR": str(ledger), "PYTHONPATH": str(TESTS)}


def _options() -> argparse.Namespace:
    parser = Parser(prog="leases.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--processes", type=positive, default=200, metavar="N", help="of the crowd; default: 200")
    add("--waiters", type=positive, default=500, metavar="N", help="that wait in line; default: 500")
    add("--seconds", type=positive, default=20, metavar="S", help="how long they wait; default: 20")
    add("--runs", type=positive, default=500, metavar="N", help="acquire and release; default: 500")
    add("--seed", type=positive, metavar="N", help="of what is random; default: another one each time")
    add("--json", type=json_file, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1, 10**9)
    return options


if __name__ == "__main__":
    sys.exit(main())
