"""How much GPU a call asks for: sizes of memory as people write them, and requests."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.options import find

#: Bytes of each unit of memory (IEC 80000-13): those with an ``i`` are powers of 1024, the others of 1000.
UNITS: Final = MappingProxyType(
    {
        "B": 1,
        "KiB": 1 << 10,
        "MiB": 1 << 20,
        "GiB": 1 << 30,
        "TiB": 1 << 40,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
)

#: Keys of a node config: how many GPUs a call gets there, or how much memory of one.
NODE_KEYS: Final = ("num-gpus", "gpu-memory")

_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(
    r"\s*(?P<number>[+-]?(?:\d[\d_]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e[+-]?\d{1,2})?)\s*(?P<unit>[a-z]*)\s*",
    re.ASCII | re.IGNORECASE,
)
# More than any GPU will have for long: most likely a slip, such as bytes with a unit.
_MOST_BYTES = 1 << 50
# Less than this no GPU hands out at once; whoever asks for "4" means something else than 4 bytes.
_LEAST_REQUEST_BYTES = 1 << 20
# What sums such as 0.1 + 0.2 + 0.7 may be off by.
_ROUNDING = 1e-9


def memory_bytes(value: int | float | str, name: str, *, allow_zero: bool = False) -> int:
    """Read a size of memory.

    ``value``: bytes, or a text with one of :data:`UNITS`: ``"2GiB"``, ``"1.5 GB"``, ``"512 mib"``. Upper and
    lower case are the same, and spaces around the number do not matter. A text without a unit is bytes. Parts
    of a byte are rounded up.
    ``name``: where the value comes from, for the error message.
    ``allow_zero``: whether 0 is a size: it is for what is kept back, not for what is asked for.
    Returns the number of bytes.
    Raises TypeError if the value is neither a number nor a text. ``True`` is none.
    Raises ConfigError if it is no size: another unit (``"2G"`` is refused, since programs disagree whether
    that is 2 GB or 2 GiB), negative, 0, not finite, or more than 1024 TiB.
    """
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise TypeError(
            f'{name} must be a number of bytes or a text such as "2GiB", not {_a(value)}: {value!r}'
        )
    number = _from_text(value, name) if isinstance(value, str) else _from_number(value, name)
    if number < 0 or (number == 0 and not allow_zero):
        raise ConfigError(
            f"{name}={_shown(value)} must be {'0 or more' if allow_zero else 'more than 0'} bytes"
        )
    if number > _MOST_BYTES:
        raise ConfigError(
            f"{name}={_shown(value)} is more than {format_bytes(_MOST_BYTES)}, which no GPU has; is its unit "
            "right?"
        )
    return math.ceil(number)


def _from_number(value: Real, name: str) -> int | Decimal:
    if isinstance(value, Integral):
        return int(value)
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} is no size of memory")
    return Decimal(float(value))


def _from_text(text: str, name: str) -> Decimal:
    found = _SIZE.fullmatch(text)
    unit = found["unit"].lower() if found else ""
    if found is None or (unit and unit not in _BY_LOWER):
        hint = ""
        if unit in ("k", "m", "g", "t"):
            upper = unit.upper()
            hint = f": {upper} could mean {upper}B or {upper}iB, so write one of these"
        raise ConfigError(
            f"{name}={_shown(text)} is no size of memory{hint}. Units are {', '.join(UNITS)}; without one it "
            'is bytes. Examples: "2GiB", "1.5 GB", 2000000000'
        )
    return Decimal(found["number"]) * _BY_LOWER[unit or "b"]


def format_bytes(number: int) -> str:
    """Write a number of bytes for people.

    ``number``: bytes; a difference may be negative.
    Returns ``"2.0 GiB"``, ``"512 MiB"``, ``"3 B"``: the largest binary unit in which it is 1 or more, with
    one digit after the point from GiB on.
    """
    sign, size = ("-", -number) if number < 0 else ("", number)
    for unit, digits in (("B", 0), ("KiB", 0), ("MiB", 0), ("GiB", 1)):
        text = f"{size / UNITS[unit]:.{digits}f}"
        if float(text) < 1024:  # as it is shown: 1023.7 MiB is 1.0 GiB
            return f"{sign}{text} {unit}"
    return f"{sign}{size / UNITS['TiB']:.1f} TiB"


@dataclass(frozen=True)
class Request:
    """How much GPU a call needs. Neither of both: found out (auto), see :mod:`flower_gpu.leases.footprint`.

    Raises TypeError if something is not a number.
    Raises ConfigError if a number cannot be used, or both are given.
    """

    # Up to 1 a share of what one GPU has to lease, the CUDA context included: with 0.25 four calls fit.
    # From 1 on a whole number of GPUs.
    num_gpus: float | None = None
    memory_bytes: int | None = None  # memory on one GPU, the CUDA context included

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
    ) -> Request:
        """Return what this node's config asks for, or else the code, or else the environment.

        ``num_gpus``: see :class:`Request`.
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
            both = " and ".join(f"{source}={_shown(value)}" for value, source in found.values())
            raise ConfigError(f"{both} are both given; give one: a share of the GPU, or a size")
        if "num_gpus" in found:
            return cls(num_gpus=_number_of_gpus(*found["num_gpus"]))
        if not found:
            return cls()
        value, source = found["gpu_memory"]
        size = memory_bytes(value, source)
        if size < _LEAST_REQUEST_BYTES:
            raise ConfigError(
                f"{source}={_shown(value)} is {size} bytes, too little for anything on a GPU. "
                'A number without a unit is bytes; for GiB write "4GiB"'
            )
        return cls(memory_bytes=size)

    @property
    def is_auto(self) -> bool:
        """Whether the amount is to be found out."""
        return self.num_gpus is None and self.memory_bytes is None

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
        raise TypeError(f"{name} must be a number such as 0.25, 1 or 2, not {_a(value)}: {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(
            f"{name}={_shown(value)} must be more than 0, and finite: a share of one GPU such as 0.25, "
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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _a(value: object) -> str:
    return f"a value of type {type(value).__name__}"
