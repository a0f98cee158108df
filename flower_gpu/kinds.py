"""What the value of an option can be, and what a wrong one is answered."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flower_gpu.errors import ConfigError

#: The longest time that can be set, 31 years. Clocks and timers of the system overflow above.
MAX_SECONDS: Final = 1e9


def is_duration(value: float) -> bool:
    """Tell whether something can take so many seconds: more than 0, up to :data:`MAX_SECONDS`."""
    return 0 < value <= MAX_SECONDS


def too_long(value: object) -> str:
    """Return what a message adds where a number of seconds is refused because it is too large."""
    is_too_long = isinstance(value, int | float) and value > MAX_SECONDS
    return f" (at most {MAX_SECONDS:g})" if is_too_long else ""


@dataclass(frozen=True)
class Kind:
    """What an option's value can be. As a function, it is a ``type`` for argparse."""

    what: str  # "a whole number, 1 or more": a value must be that
    metavar: str | None = None
    read: Callable[[str], Any] = str  # raises a ValueError
    allows: Callable[[Any], bool] = lambda value: True
    types: tuple[type, ...] = (str,)
    words: tuple[str, ...] = ()  # the only values
    is_repeated: bool = False  # the option may be given several times

    def __call__(self, text: str) -> Any:
        """Read a text of a command line."""
        import argparse

        try:
            return self.from_text(text, "")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from None

    def from_text(self, text: str, source: str) -> Any:
        """Read a text.

        Raises
        ------
        ConfigError
            If the value cannot be used; the message begins with ``source``.
        """
        try:
            value = self.read(text)
        except (ValueError, OverflowError):
            raise ConfigError(self._refusal(text, source)) from None
        if not self.allows(value):
            raise ConfigError(self._refusal(text, source))
        return value

    def check(self, value: Any, source: str) -> Any:
        """Check a value that is no text from outside.

        Raises
        ------
        TypeError
            If it has the wrong type.
        ConfigError
            If it cannot be used.
        """
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            raise TypeError(f"{source} must be {self.what}, not a {type(value).__name__}: {value!r}")
        if not self.allows(value):
            raise ConfigError(self._refusal(value, source))
        return value

    def _refusal(self, value: object, source: str) -> str:
        if self.words:
            return f"{source}={value!r} is not one of {', '.join(self.words)}"
        return f"{source} must be {self.what}, not {value!r}"


def words(*allowed: str) -> Kind:
    """Return the kind of option that is one of these words."""
    return Kind(
        f"one of the words {', '.join(allowed)}", None, str, lambda word: word in allowed, (str,), allowed
    )


def _path(text: str) -> Path:
    return Path(_filled(text)).expanduser()


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text


def _whole(text: str) -> int:
    # int() also takes 1_0, and digits of other scripts.
    if not re.fullmatch(r"\s*[+-]?\d{1,20}\s*", text, re.ASCII):
        raise ValueError
    return int(text)


def _number(what: str, allows: Callable[[Any], bool], metavar: str = "N", read: Any = _whole) -> Kind:
    return Kind(what, metavar, read, allows, (int,) if read is _whole else (int, float))


COUNT: Final = _number("a whole number, 1 or more", lambda n: n >= 1)
NON_NEGATIVE: Final = _number("a whole number, 0 or more", lambda n: n >= 0)
PORT: Final = _number("a whole number, 1 or more and at most 65535", lambda n: 1 <= n <= 65535)
POSITIVE: Final = _number("a number above 0", lambda x: 0 < x < float("inf"), "X", float)
SECONDS: Final = _number(f"a number of seconds above 0, at most {MAX_SECONDS:g}", is_duration, "S", float)
SECONDS_OR_0: Final = _number(
    f"a number of seconds, 0 to {MAX_SECONDS:g}", lambda s: s == 0 or is_duration(s), "S", float
)
GPUS: Final = _number(
    "a number of GPUs above 0, such as 0.25, 1 or 2", lambda x: 0 < x < float("inf"), "X", float
)
TEXT: Final = Kind("a text that is not empty", "NAME", _filled)
SIZE: Final = Kind("a size such as 2GiB", "SIZE", _filled)
GPU_IDS: Final = Kind("GPU numbers or UUIDs such as 0,1", "LIST", _filled)
FOLDER: Final = Kind("a path", "DIR", _path, types=(str, Path))
#: The processes that read it may run in another folder.
ABSOLUTE_PATH: Final = Kind("a path", "DIR", lambda text: str(_path(text).resolve()))
TRUE_OR_FALSE: Final = Kind(
    "true or false",
    "true|false",
    lambda text: {"true": True, "false": False}.get(text),
    lambda v: v is not None,
)
#: ``key=value`` pairs in TOML; the option may be repeated.
PAIRS: Final = Kind("key=value pairs", "'K=V ...'", is_repeated=True)
#: ``--keep-going``; or ``--no-report``, where the default is True.
SWITCH: Final = Kind("true or false", types=(bool,))
