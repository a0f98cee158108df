"""The torch device of this process."""

from __future__ import annotations

import torch


def device() -> torch.device:
    """Torch device to train and evaluate on in this process.

    Returns
    -------
    torch.device
        ``cuda:0`` if CUDA works here, else ``cpu``. A worker sees the GPU meant for it as its
        first, so code that says ``cuda:0`` itself means the same device.
    """
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
