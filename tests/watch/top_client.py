"""A client with a call that waits for a file in the given folder, so that tests can observe it meanwhile."""

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
    """Use 1 GiB of the GPU, and wait in the middle until the file "go-on" exists."""
    lease = json.loads(os.environ["FLOWER_GPU_LEASE"])
    nvml_stub.allocate(lease["shares"][0]["uuid"], nvml_stub.GIB)
    for item in flower_gpu.progress(range(40), desc="epoch \x1b[2J1"):
        if item == 12:
            # Progress is reported at once if the last report is long enough ago.
            time.sleep(0.6)
        if item == 13:
            until(Path(folder, "go-on").exists)


if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    flower_gpu.run_in_worker(train, folder, start_method="spawn", name="7", gpu_memory="4GiB")
