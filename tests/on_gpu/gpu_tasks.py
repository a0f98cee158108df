"""Tasks that use the GPU, run in workers only."""

from __future__ import annotations

from typing import Any

GIB = 1024**3


def used_bytes() -> int:
    """Return the used memory of the first GPU, as `nvidia-smi --query-gpu=memory.used` does."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


def train(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Hold a gibibyte, take a few steps of a small network, report the card's use meanwhile."""
    import torch
    from gpu_hosts import layer

    import flower_gpu

    device = flower_gpu.device()
    assert device.type == "cuda", "the GPU is hidden from the worker"
    held = torch.zeros(GIB // 4, device=device)
    model = layer(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(torch.randn(64, 256, device=device)).square().mean() + held[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return weights, 64, {"used_bytes": used_bytes()}


def train_and_die(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Die with memory held on the card."""
    import os
    import signal

    train(weights, config)
    os.kill(os.getpid(), signal.SIGKILL)
    return weights, 64, {}
