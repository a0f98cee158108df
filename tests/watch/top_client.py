"""A client whose calls wait for files: for tests that look at them meanwhile.

Arguments: folder of the files, and what the call asks for: a size, or "cpu".
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import nvml_stub

import flower_gpu


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def train(folder: str) -> None:
    """Use 1 GiB of the GPU, if there is one, and stop in the middle."""
    if text := os.environ.get("FLOWER_GPU_LEASE"):
        nvml_stub.allocate(json.loads(text)["shares"][0]["uuid"], nvml_stub.GIB)
    for item in flower_gpu.progress(range(40), desc="epoch \x1b[2J1"):
        if item == 12:
            # More than a moment after the item before: that is told at once then.
            time.sleep(0.6)
        if item == 13:
            wait_for(Path(folder, "go-on"))


def main(folder: str, asked: str) -> None:
    options = {"gpu": "never"} if asked == "cpu" else {"gpu_memory": asked}
    flower_gpu.run_in_worker(train, folder, start_method="spawn", name="7", **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
