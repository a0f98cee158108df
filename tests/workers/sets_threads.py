"""A task module that sets the number of threads before it imports torch, as many do."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch


def threads_of_torch() -> tuple[str, int]:
    return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
