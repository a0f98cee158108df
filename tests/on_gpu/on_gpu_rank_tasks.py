"""Tasks of ranks on real GPUs. This module is imported in workers only."""

from __future__ import annotations

import os
from typing import Any

import torch
from gpu_hosts import layer
from on_gpu_tasks import used_bytes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flower_gpu import device, distributed, to_device
from flower_gpu.pytorch.distributed import joined, rank, total, world_size
from flower_gpu.pytorch.weights import get_weights, is_sharded, set_weights

GIB = 1 << 30


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer(256, 512), nn.ReLU(), layer(512, 512), nn.ReLU(), layer(512, 10))


def first_weights() -> list[Any]:
    return get_weights(model())


def train(weights: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
    """Take ten steps on data that is the same for any number of ranks, and report the devices used."""
    torch.backends.cuda.matmul.allow_tf32 = False
    network = model()
    set_weights(network, weights)
    network = to_device(network)
    if world_size() > 1:
        network = fully_shard(network) if config["way"] == "fsdp" else DistributedDataParallel(network)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    y = torch.arange(64) % 10
    part = slice(rank(), None, world_size())
    x, y = x[part].to(device()), y[part].to(device())
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    report = {
        "world": world_size(),
        "devices": torch.cuda.device_count(),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "backend": torch.distributed.get_backend() if world_size() > 1 else "",
        "used": used_bytes(),
    }
    return get_weights(network), 64, report


in_ranks = distributed(train)


@distributed
def takes_too_much() -> int:
    """Allocate more memory than the GPU has, in the last rank."""
    if rank() == world_size() - 1:
        torch.empty(1 << 50, dtype=torch.uint8, device=device())
    return int(total(1))


def nccl_alone() -> dict[str, Any]:
    """Run all NCCL operations that ranks use in a group of one, which needs no second GPU."""
    descriptor = os.memfd_create("test")
    file = f"/proc/{os.getpid()}/fd/{descriptor}"
    with joined(file, 0, 1, 60):
        torch.distributed.barrier()
        value = torch.ones(3, dtype=torch.float64, device=device())
        torch.distributed.all_reduce(value)
        objects = [{"a": 1}]
        torch.distributed.broadcast_object_list(objects, src=0)
        network = model()
        expected = get_weights(network)
        sharded = fully_shard(network)
        sharded(torch.ones(2, 256, device=device())).sum().backward()
        difference = max(float(abs(a - b).max()) for a, b in zip(expected, get_weights(sharded), strict=True))
        optimizer = torch.optim.SGD(sharded.parameters(), 0.1, momentum=0.9)
        optimizer.step()
        return {
            "backend": torch.distributed.get_backend(),
            "sum": value.tolist(),
            "objects": objects,
            "is_sharded": is_sharded(sharded),
            "difference": difference,
        }
