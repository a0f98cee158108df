"""Numbers of a function that runs in several ranks: which rank this is, and means and sums over all of them.

:func:`flower_gpu.distributed` makes such a function. These can be called anywhere: with one rank nothing
changes. Model, data and checkpoints are brought to ranks by PyTorch's own calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from flower_gpu.pytorch import group
from flower_gpu.pytorch.group import rank as rank
from flower_gpu.pytorch.group import world_size as world_size


@overload
def mean(value: float) -> float: ...
@overload
def mean(value: Mapping[str, float]) -> dict[str, float]: ...
def mean(value: Any) -> Any:
    """Return the mean over the ranks of a number, or of each number of a mapping; all ranks call it."""
    if isinstance(value, Mapping):
        means = [number / group.world_size() for number in group.summed([float(v) for v in value.values()])]
        return dict(zip(value, means, strict=True))
    return group.summed([float(value)])[0] / group.world_size()


def total(value: float) -> float:
    """Return the sum over the ranks of a number; a whole one stays whole; all ranks call it."""
    found = group.summed([float(value)])[0]
    return round(found) if isinstance(value, int) else found
