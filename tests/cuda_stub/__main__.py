"""Runs a command on a host with simulated GPUs.

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
    parser.add_argument("--total", default="16GiB", metavar="SIZE", help="memory of each GPU")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of each GPU: context, context_ms, kernel_us, compute_mode, name ...",
    )
    parser.add_argument(
        "--host",
        type=Path,
        metavar="DIR",
        help="folder of a host that several commands share; default: a new host",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cuda-stub-") as new:
        folder = arguments.host or Path(new)
        host = cuda_stub.Host(folder, gpus=arguments.gpus, total=SIZE.check(arguments.total, "--total"))
        for index in range(arguments.gpus):
            host.set(index, **dict(field.split("=", 1) for field in arguments.set))
        # The command needs separate fork servers, because the user's are for other GPUs.
        (state := folder / "state").mkdir(mode=0o700, exist_ok=True)
        path = f"{Path(__file__).parent / 'mps'}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "FLOWER_GPU_STATE_DIR": str(state), **host.env}
        return subprocess.run(arguments.command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
