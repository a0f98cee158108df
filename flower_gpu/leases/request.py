"""How much GPU a call asks for: sizes of memory as people write them, and requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.kinds import a_value, memory_bytes, shown
from flower_gpu.options import find
from flower_gpu.printable import format_bytes

#: Keys of a node config: how many GPUs a call gets there, or how much memory of one.
NODE_KEYS: Final = ("num-gpus", "gpu-memory")

# Less than this no GPU hands out at once; whoever asks for "4" means something else than 4 bytes.
_LEAST_REQUEST_BYTES = 1 << 20
# What sums such as 0.1 + 0.2 + 0.7 may be off by.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class LeaseRequest:
    """How much GPU a call needs. Neither of both: found out (auto), see :mod:`flower_gpu.leases.footprint`.

    Raises TypeError if something is not a number.
    Raises ConfigError if a number cannot be used, or both are given.
    """

    # Up to 1 a share of what one GPU has to lease, the CUDA context included: with 0.25 four calls fit.
    # From 1 on a whole number of GPUs.
    num_gpus: float | None = None
    memory_bytes: int | None = None  # memory on one GPU, the CUDA context included
    alone: bool = False  # with nobody else on the GPU; where neither is given, all that it has

    def __post_init__(self) -> None:
        if self.num_gpus is not None and self.memory_bytes is not None:
            raise ConfigError(
                f"num_gpus={self.num_gpus!r} and {format_bytes(self.memory_bytes)} of GPU memory are both "
                "given; give one of them"
            )
        if self.num_gpus is not None:
            object.__setattr__(self, "num_gpus", _number_of_gpus(self.num_gpus, "num_gpus"))
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", memory_bytes(self.memory_bytes, "memory_bytes"))

    @classmethod
    def resolve(
        cls,
        num_gpus: float | None = None,
        gpu_memory: int | str | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
        node_config: Mapping[str, Any] = MappingProxyType({}),
    ) -> LeaseRequest:
        """Return what this node's config asks for, or else the code, or else the environment.

        ``num_gpus``: see :class:`LeaseRequest`.
        ``gpu_memory``: a size as :func:`memory_bytes` reads it, at least 1 MiB.
        ``environ``: ``FLOWER_GPU_NUM_GPUS`` or ``FLOWER_GPU_MEMORY`` counts when the code names neither.
        ``node_config``: ``num-gpus`` or ``gpu-memory`` counts whatever the code says: it is the operator's,
        who knows the node.
        Raises TypeError if an argument has the wrong type.
        Raises ConfigError if a value cannot be used, or one place names both; the message names where it came
        from.
        """
        code = {"num_gpus": num_gpus, "gpu_memory": gpu_memory}
        found = find(["num_gpus", "gpu_memory"], code, environ, node_config)
        if len(found) == 2:
            both = " and ".join(f"{source}={shown(value)}" for value, source in found.values())
            raise ConfigError(f"{both} are both given; give one: a share of the GPU, or a size")
        if "num_gpus" in found:
            return cls(num_gpus=_number_of_gpus(*found["num_gpus"]))
        if not found:
            return cls()
        value, source = found["gpu_memory"]
        size = memory_bytes(value, source)
        if size < _LEAST_REQUEST_BYTES:
            raise ConfigError(
                f"{source}={shown(value)} is {size} bytes, too little for anything on a GPU. "
                'A number without a unit is bytes; for GiB write "4GiB"'
            )
        return cls(memory_bytes=size)

    @property
    def is_auto(self) -> bool:
        """Whether the amount is to be found out."""
        return self.num_gpus is None and self.memory_bytes is None and not self.alone

    @property
    def count(self) -> int:
        """How many GPUs it takes part of: 1 unless ``num_gpus`` is 2 or more."""
        return 1 if self.num_gpus is None or self.num_gpus <= 1 else int(self.num_gpus)

    @property
    def share(self) -> float | None:
        """The share of each GPU's budget, up to 1; None where it asks for bytes, or is auto."""
        return None if self.num_gpus is None else min(self.num_gpus, 1.0)

    def describe(self) -> str:
        """Return it in words."""
        if self.memory_bytes is not None:
            return f"{format_bytes(self.memory_bytes)} of one GPU"
        if self.num_gpus is None:
            return "one GPU, as much of it as is needed (auto)"
        if self.num_gpus < 1:
            return f"{self.num_gpus:.3g} of one GPU"
        return "1 GPU" if self.count == 1 else f"{self.count} GPUs"


def _number_of_gpus(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number such as 0.25, 1 or 2, not {a_value(value)}: {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(
            f"{name}={shown(value)} must be more than 0, and finite: a share of one GPU such as 0.25, "
            "or 1, 2, ... (no GPU at all is the device policy `never`)"
        )
    whole = float(round(number))
    if whole >= 1 and abs(number - whole) <= _ROUNDING:
        return whole
    if number > 1:
        raise ConfigError(
            f"{name}={value!r} is neither a share of one GPU (up to 1) nor a whole number of GPUs; a call "
            f"can have {math.floor(number)} or {math.ceil(number)}"
        )
    return number
