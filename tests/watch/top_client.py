"""A client whose calls wait for files in the folder that is given: for tests that look at them meanwhile."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import nvml_stub
from waiting import until

import flower_gpu


def train(folder: str) -> None:
    """Use 1 GiB of the GPU, and stop in the middle."""
    lease = json.loads(os.environ["FLOWER_GPU_LEASE"])
    nvml_stub.allocate(lease["shares"][0]["uuid"], nvml_stub.GIB)
    for item in flower_gpu.progress(range(40), desc="epoch \x1b[2J1"):
        if item == 12:
            # More than a moment after the item before: that is told at once then.
            time.sleep(0.6)
        if item == 13:
            until(Path(folder, "go-on").exists)


if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    flower_gpu.run_in_worker(train, folder, start_method="spawn", name="7", gpu_memory="4GiB")
