"""Whether several processes can share a card: by its compute mode, and by NVIDIA's MPS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flower_gpu.gpu.gpus import GPU

# Where the daemon listens ("Multi-Process Service", environment variables), and the file with its number.
_PIPES_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
_PIPES: Final = "/tmp/nvidia-mps"
_CONTROL: Final = "control"
_PID_FILE: Final = "nvidia-cuda-mps-control.pid"


def mps_pipes(environ: Mapping[str, str]) -> Path | None:
    """Return the folder by which CUDA finds a running MPS daemon; None where it finds none."""
    folder = Path(environ.get(_PIPES_VARIABLE) or _PIPES)
    try:
        if not (folder / _CONTROL).exists():
            return None
    except OSError:  # another account's, that nobody else enters
        return None
    try:
        os.kill(int((folder / _PID_FILE).read_text()), 0)
    except ProcessLookupError:  # it was killed, and has left its files
        return None
    except (OSError, ValueError):  # another account's, of another namespace, or without such a file
        return folder
    return folder


def is_for_one(gpu: GPU, environ: Mapping[str, str]) -> bool:
    """Tell whether one process at a time can compute on a GPU.

    The server of an MPS daemon is one process, and computes for all of its clients.
    """
    return (gpu.compute_mode or "").startswith("EXCLUSIVE") and mps_pipes(environ) is None
