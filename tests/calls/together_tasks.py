"""Tasks that report which resources of the host a worker, a confined worker or a rank can use."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed as torch_distributed

from flower_gpu import distributed
from flower_gpu.pytorch.distributed import rank, total, world_size

GIB = 1 << 30

_join = torch_distributed.init_process_group


def _join_by_gloo(backend: str, **options: Any) -> None:
    """Use gloo on the CPU, because NCCL brings its own CUDA runtime, which the stand-in does not replace."""
    _join("gloo", **{name: value for name, value in options.items() if name != "device_id"})


torch_distributed.init_process_group = _join_by_gloo  # type: ignore[assignment]


def look(other: str, notes: str = "") -> dict[str, Any]:
    """Try to open another GPU's device file and to exceed the lease. Return the outcomes."""
    try:
        Path(other).read_text()
        opened = "opened"
    except OSError as error:
        opened = type(error).__name__
    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL(None)
    code = cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(15 * GIB + GIB // 2))
    # Clear the error, because PyTorch would otherwise report it as its own.
    cuda.cudaGetLastError()
    report = {
        "rank": rank(),
        "pid": os.getpid(),
        "opened": opened,
        "malloc": code,
        "gpus": torch.cuda.device_count(),
        "is_capped": float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 1,
        "has_threads": torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]),
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "group": Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip(),
    }
    if notes:
        Path(notes, os.urandom(4).hex()).write_text(json.dumps(report))
    return report


@distributed
def look_in_ranks(other: str, notes: str) -> None:
    """Call :func:`look` in each rank, after all ranks have met."""
    assert total(1) == world_size()
    look(other, notes)
