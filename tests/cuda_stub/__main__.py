"""Runs a command on a host with cards that are not there.

``PYTHONPATH=tests python -m cuda_stub --gpus 2 -- flower-gpu gpus``
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import cuda_stub
from flower_gpu.kinds import SIZE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cuda_stub", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--total", default="16GiB", metavar="SIZE", help="memory of each card")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="of each card: context, context_ms, kernel_us, compute_mode, name ...",
    )
    parser.add_argument(
        "--host", type=Path, metavar="DIR", help="of several commands on one host; default: a new one"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cuda-stub-") as new:
        folder = asked.host or Path(new)
        host = cuda_stub.Host(folder, gpus=asked.gpus, total=SIZE.check(asked.total, "--total"))
        for index in range(asked.gpus):
            host.set(index, **dict(field.split("=", 1) for field in asked.set))
        # Leases and fork servers of their own: the user's know other cards.
        own = {"PATH": f"{Path(__file__).parent / 'mps'}:{os.environ['PATH']}"}
        for name in ("LEDGER", "STATE"):
            place = folder / name.lower()
            place.mkdir(exist_ok=True)
            place.chmod(0o1777 if name == "LEDGER" else 0o700)
            own[f"FLOWER_GPU_{name}_DIR"] = str(place)
        return subprocess.run(asked.command, env={**os.environ, **own, **host.env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
