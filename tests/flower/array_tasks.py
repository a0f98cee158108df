"""Tasks on Flower's arrays. Workers import this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.common import Array, ArrayRecord


def same(value: Any) -> Any:
    return value


def update(record: ArrayRecord) -> ArrayRecord:
    updated = []
    for array in record.values():
        weights = array.numpy()
        weights += 1
        updated.append(weights)
    return ArrayRecord(updated)


def add_one_and_look_again(array: Array) -> tuple[float, float, bool]:
    """Change the result of ``numpy()``. The array itself must not change."""
    first = array.numpy()
    first += 1
    return float(first.sum()), float(array.numpy().sum()), array.data == Array(array.numpy()).data


def torch_step(record: ArrayRecord) -> ArrayRecord:
    import torch

    state = record.to_torch_state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor += 1
    return ArrayRecord(state)


def files(record: ArrayRecord) -> tuple[list[str], float]:
    """Return the names of the memory files that this worker has mapped, and the sum over all arrays."""
    total = sum(float(array.numpy().sum()) for array in record.values())
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split("memfd:")[1].split()[0] for line in lines if "memfd:" in line}), total
