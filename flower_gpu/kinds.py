"""Kinds of option values: how each is parsed and checked, and the error for an invalid value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.printable import UNITS, format_bytes

#: The longest duration, 31 years. Clocks and timers of the system overflow beyond it.
MAX_SECONDS: Final = 1e9


def is_duration(value: float) -> bool:
    """Return True if the number of seconds is above 0 and at most :data:`MAX_SECONDS`."""
    return 0 < value <= MAX_SECONDS


class RefusedValueError(ValueError):
    """A value cannot be parsed. The text follows the value in a message."""


@dataclass(frozen=True)
class Kind:
    """The valid values of an option."""

    what: str  # description of a valid value, such as "a whole number, 1 or more"
    metavar: str | None = None
    read: Callable[[Any], Any] = lambda value: value  # parses a text or a value; raises ValueError
    allows: Callable[[Any], bool] = lambda value: True  # returns True for a valid parsed value
    types: tuple[type, ...] = (str,)  # accepted types of values from code or a config
    words: tuple[str, ...] = ()  # the only valid values
    meanings: tuple[str, ...] = ()  # short descriptions of the words
    is_repeated: bool = False  # the option may be given several times
    keeps_text: bool = False  # a command line keeps the text, for messages and for other processes

    def from_text(self, text: Any, source: str) -> Any:
        """Parse a text of an environment variable or a command line.

        Raises ConfigError if it is invalid. The message begins with ``source``.
        """
        try:
            value = self.read(text)
            if self.allows(value):
                return value
        except RefusedValueError as error:
            raise ConfigError(f"{_given(text, source)} {error}") from None
        except (ValueError, OverflowError):
            pass
        raise ConfigError(self._refusal(text, source))

    def check(self, value: Any, source: str) -> Any:
        """Parse a value from code or a config.

        Raises TypeError if it has the wrong type, and ConfigError like :meth:`from_text`.
        """
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            raise TypeError(f"{source} must be {self.what}, not a {type(value).__name__}: {value!r}")
        return self.from_text(value, source)

    def _refusal(self, value: object, source: str) -> str:
        if not self.words:
            return f"{source} must be {self.what}, not {_shown(value)}"
        meanings = [f" ({meaning})" for meaning in self.meanings] or [""] * len(self.words)
        listed = ", ".join(word + meaning for word, meaning in zip(self.words, meanings, strict=True))
        return f"{_given(value, source)} is not one of {listed}"


def _given(value: object, source: str) -> str:
    return f"{source}={_shown(value)}" if source else _shown(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def words(*allowed: str, meanings: tuple[str, ...] = ()) -> Kind:
    """Return the kind of an option with one of these words as its value."""
    what = f"one of the words {', '.join(allowed)}"
    return Kind(what, allows=lambda word: word in allowed, words=allowed, meanings=meanings)


def several(*allowed: str) -> Kind:
    """Return the kind of an option with a comma-separated list of these words. It may be repeated."""
    return Kind(
        f"one or more of the words {', '.join(allowed)}",
        "|".join(allowed),
        lambda text: tuple(word.strip() for word in text.split(",")),
        lambda words: all(word in allowed for word in words),
        is_repeated=True,
    )


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text


def _path(text: str | Path) -> Path:
    return Path(_filled(str(text))).expanduser()


def _whole(value: str | int) -> int:
    # int() also accepts 1_0 and digits of other scripts.
    if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?\d{1,20}\s*", value, re.ASCII):
        raise ValueError
    return int(value)


# Largest rounding error of sums such as 0.1 + 0.2 + 0.7
_ROUNDING = 1e-9


def _gpus(value: Any) -> float:
    """Parse a share of one GPU, up to 1, or a whole number of GPUs."""
    number = float(value)
    whole = float(round(number))
    return whole if whole >= 1 and abs(number - whole) <= _ROUNDING else number


_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(
    r"\s*(?P<number>[+-]?(?:\d[\d_]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e[+-]?\d{1,2})?)\s*(?P<unit>[a-z]*)\s*",
    re.ASCII | re.IGNORECASE,
)
# Largest size. A larger one is most likely a mistake, such as a number of bytes with a unit.
_MAX_BYTES = 1 << 50
# Smallest size on a GPU, which is what a GPU allocates at once. "4" most likely does not mean 4 bytes.
_MIN_GPU_BYTES = 1 << 20


def _bytes(value: Any) -> int:
    """Parse a size of memory: bytes, or a text with one of :data:`UNITS`, such as ``"2GiB"`` or ``"1.5 gb"``.

    A text without a unit means bytes. Fractions of a byte are rounded up. ``"2G"`` is refused, because
    programs disagree whether it means 2 GB or 2 GiB.
    """
    if isinstance(value, str):
        number = _from_text(value)
    elif isinstance(value, Integral):
        number = Decimal(int(value))
    elif math.isfinite(value):
        number = Decimal(float(value))
    else:
        raise RefusedValueError("is not a memory size")
    if number > _MAX_BYTES:
        raise RefusedValueError(f"is more than {format_bytes(_MAX_BYTES)}, which no GPU has. Check the unit")
    return math.ceil(number)


def _from_text(text: str) -> Decimal:
    match = _SIZE.fullmatch(text)
    unit = match["unit"].lower() if match else ""
    if match is None or (unit and unit not in _BY_LOWER):
        hint = ""
        if unit in ("k", "m", "g", "t"):
            upper = unit.upper()
            hint = f": {upper} could mean {upper}B or {upper}iB, so write one of these"
        raise RefusedValueError(
            f"is not a memory size{hint}. Units are {', '.join(UNITS)}; without one it is bytes. "
            'Examples: "2GiB", "1.5 GB", 2000000000'
        )
    return Decimal(match["number"]) * _BY_LOWER[unit or "b"]


def _positive_bytes(value: Any) -> int:
    size = _bytes(value)
    if size <= 0:
        raise RefusedValueError("must be more than 0 bytes")
    return size


def _gpu_bytes(value: Any) -> int:
    size = _positive_bytes(value)
    if size < _MIN_GPU_BYTES:
        raise RefusedValueError(
            f"is {size} bytes, too little for anything on a GPU. "
            'A number without a unit is bytes; for GiB write "4GiB"'
        )
    return size


_GPU_NUMBER = re.compile(r"[+-]?\d{1,9}", re.ASCII)
# UUIDs of NVML, or prefixes of them. Older drivers name MIG devices MIG-GPU-<uuid>/<number>/<number>.
_UUID = re.compile(r"(?:GPU|MIG)-[\w./-]+", re.ASCII | re.IGNORECASE)


def _gpu_ids(value: int | str) -> tuple[int | str, ...]:
    """Parse a list of GPUs without duplicates, in the given order. Negative numbers are kept."""
    if isinstance(value, int):
        return (value,)
    entries: dict[int | str, None] = {}
    for entry in (part.strip() for part in value.split(",")):
        if _GPU_NUMBER.fullmatch(entry):
            entries[int(entry)] = None
        elif _UUID.fullmatch(entry):
            entries[entry] = None
        elif entry:
            raise RefusedValueError(
                f"names {_shown(entry)}, which is neither a GPU number nor a UUID (GPU-... or MIG-..., see "
                "`nvidia-smi -L`)"
            )
        else:
            raise RefusedValueError('has an empty entry; write numbers or UUIDs such as "0" or "4,5"')
    return tuple(entries)


def _count(what: str, allows: Callable[[int], bool]) -> Kind:
    return Kind(what, "N", _whole, allows, (Integral,))


def _number(what: str, metavar: str, allows: Callable[[float], bool]) -> Kind:
    return Kind(what, metavar, float, allows, (int, float))


COUNT: Final = _count("a whole number, 1 or more", lambda n: n >= 1)
NON_NEGATIVE: Final = _count("a whole number, 0 or more", lambda n: n >= 0)
PORT: Final = _count("a whole number, 1 or more and at most 65535", lambda n: 1 <= n <= 65535)
PORT_OR_0: Final = _count("a whole number, 0 to 65535", lambda n: 0 <= n <= 65535)
#: Limited, so that a duration times the factor does not overflow clocks.
FACTOR: Final = _number("a number from 1 to 1000000", "X", lambda x: 1 <= x <= 1e6)
PART: Final = _number("a number from 0 to 1", "X", lambda x: 0 <= x <= 1)
POSITIVE: Final = _number("a number above 0", "X", lambda x: 0 < x < math.inf)
SECONDS: Final = _number(f"a number of seconds above 0, at most {MAX_SECONDS:g}", "S", is_duration)
SECONDS_OR_0: Final = _number(
    f"a number of seconds, 0 to {MAX_SECONDS:g}", "S", lambda s: s == 0 or is_duration(s)
)
#: Seconds between two refreshes of a screen.
INTERVAL: Final = _number(
    f"a number of seconds, 0.1 to {MAX_SECONDS:g}", "S", lambda s: 0.1 <= s <= MAX_SECONDS
)
CPUS: Final = _number(
    "a number of cores from 0.001 on, such as 0.5, 1 or 4", "X", lambda x: 0.001 <= x < math.inf
)
GPUS: Final = Kind(
    "a share of one GPU such as 0.25, or a whole number of GPUs such as 1 or 2 (for no GPU, give the policy "
    "never)",
    "X",
    _gpus,
    lambda number: 0 < number <= 1 or number == round(number) > 1,
    (Real,),
)
SHARE: Final = _number("a share above 0 and up to 1, such as 0.25", "X", lambda x: 0 < x <= 1)
SIZE: Final = Kind(
    'a number of bytes or a text such as "2GiB"', "SIZE", _positive_bytes, types=(Real, str), keeps_text=True
)
GPU_SIZE: Final = replace(SIZE, read=_gpu_bytes)
SIZE_OR_0: Final = replace(SIZE, what="0 or more bytes", read=_bytes, allows=lambda size: size >= 0)
GPU_IDS: Final = Kind(
    'a GPU number, a UUID, or several of them in one text such as "4,5"',
    "LIST",
    _gpu_ids,
    types=(int, str),
    keeps_text=True,
)
TEXT: Final = Kind("a non-empty text", "NAME", _filled)
FOLDER: Final = Kind("a path", "DIR", _path, types=(str, Path))
#: Resolved at once, because other processes may read the path in another working directory.
ABSOLUTE_PATH: Final = Kind("a path", "DIR", lambda text: str(_path(text).resolve()))
#: Like :data:`ABSOLUTE_PATH` and :data:`PORT`, for options that may be repeated.
FOLDERS: Final = replace(ABSOLUTE_PATH, is_repeated=True)
PORTS: Final = replace(PORT, metavar="PORT", is_repeated=True)
TRUE_OR_FALSE: Final = Kind(
    "true or false",
    "true|false",
    lambda value: {"true": True, "false": False}.get(value, value),
    lambda value: isinstance(value, bool),
    (bool,),
)
#: ``key=value`` pairs in TOML, for an option that may be repeated.
PAIRS: Final = Kind("key=value pairs", "'K=V ...'", is_repeated=True)
#: A switch such as ``--keep-going``, or ``--no-progress`` if the default is True.
SWITCH: Final = Kind("true or false", types=(bool,))
