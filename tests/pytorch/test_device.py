"""The worker's device."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

import flower_gpu
from flower_gpu.pytorch import device as module


def test_device_is_a_torch_device():
    assert isinstance(module.device(), torch.device)
    assert str(module.device()) == ("cuda:0" if torch.cuda.is_available() else "cpu")


def test_public_name_is_the_same_function():
    assert flower_gpu.device is module.device


def test_cpu_when_every_gpu_is_hidden():
    done = subprocess.run(
        [sys.executable, "-c", "import flower_gpu; print(flower_gpu.device())"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "cpu\n"
