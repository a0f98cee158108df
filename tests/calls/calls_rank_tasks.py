"""Tasks of ranks on a host with stub GPUs: they allocate memory and report their view."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import nvml_stub
import torch

from flower_gpu import distributed
from flower_gpu.pytorch.distributed import rank, total

GIB = 1 << 30


@distributed(num_gpus=2)
def hold(folder: str, until: str) -> Any:
    """Allocate 2 GiB in the first rank and 3 GiB in the second, and wait for a file."""
    uuid = os.environ["CUDA_VISIBLE_DEVICES"]
    nvml_stub.allocate(uuid, (2 + rank()) * GIB)
    Path(folder, f"report-{rank()}").write_text(
        json.dumps({"pid": os.getpid(), "visible": uuid, "lease": os.environ["FLOWER_GPU_LEASE"]})
    )
    total(1)
    while not Path(folder, until).exists():
        time.sleep(0.02)
    return total(rank())


@distributed
def run_out() -> Any:
    """Run out of memory in rank 1, if there is a GPU."""
    if rank() == 1 and os.environ["CUDA_VISIBLE_DEVICES"]:
        nvml_stub.allocate(os.environ["CUDA_VISIBLE_DEVICES"], GIB)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return [total(1), os.environ["CUDA_VISIBLE_DEVICES"]]
