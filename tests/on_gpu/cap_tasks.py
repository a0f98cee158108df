"""Tasks that take GPU memory, run in workers with a lease."""

from __future__ import annotations

import os
import subprocess
import sys

from flower_gpu.calls import environment


def take(nbytes: int) -> int:
    """Take memory in one piece."""
    import torch

    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda").numel()


def take_all(piece: int) -> int:
    """Take pieces until there are no more."""
    import torch

    held = []
    try:
        while True:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return len(held) * piece


def take_with_settings_of_its_own(nbytes: int) -> int:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return take(nbytes)


def visible() -> int:
    import torch

    return torch.cuda.device_count()


def hidden_count() -> int:
    """Count the GPUs that a process sees from which they are hidden."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        env={**os.environ, **environment.of_worker(None, {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)
