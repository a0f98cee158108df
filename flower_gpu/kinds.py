"""An option: what its value can be, what a wrong one is answered, how it is given on a command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from flower_gpu.errors import ConfigError
from flower_gpu.printable import UNITS, format_bytes

if TYPE_CHECKING:
    import argparse  # it takes milliseconds to import, and workers need none

_NOTHING: Mapping[str, Any] = MappingProxyType({})

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
    meanings: tuple[str, ...] = ()  # of the words, each in a short line
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

    @property
    def listed(self) -> str:
        """The words as a message lists them, with what they mean."""
        if not self.meanings:
            return ", ".join(self.words)
        return ", ".join(f"{w} ({meaning})" for w, meaning in zip(self.words, self.meanings, strict=True))

    def _refusal(self, value: object, source: str) -> str:
        if self.words:
            given = f"{source}={value!r}" if source else repr(value)
            return f"{given} is not one of {self.listed}"
        return f"{source} must be {self.what}, not {value!r}"


def words(*allowed: str, meanings: tuple[str, ...] = ()) -> Kind:
    """Return the kind of option that is one of these words."""
    what = f"one of the words {', '.join(allowed)}"
    return Kind(what, None, str, lambda word: word in allowed, (str,), allowed, meanings)


def several(*allowed: str) -> Kind:
    """Return the kind of option that is some of these words, with commas between them; it may be repeated."""
    return Kind(
        f"one or more of the words {', '.join(allowed)}",
        "|".join(allowed),
        lambda text: tuple(word.strip() for word in text.split(",")),
        lambda given: all(word in allowed for word in given),
        (tuple,),
        is_repeated=True,
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


_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(
    r"\s*(?P<number>[+-]?(?:\d[\d_]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e[+-]?\d{1,2})?)\s*(?P<unit>[a-z]*)\s*",
    re.ASCII | re.IGNORECASE,
)
# More than any GPU will have for long: most likely a slip, such as bytes with a unit.
_MOST_BYTES = 1 << 50


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
            f'{name} must be a number of bytes or a text such as "2GiB", not {a_value(value)}: {value!r}'
        )
    number = _from_text(value, name) if isinstance(value, str) else _from_number(value, name)
    if number < 0 or (number == 0 and not allow_zero):
        raise ConfigError(
            f"{name}={shown(value)} must be {'0 or more' if allow_zero else 'more than 0'} bytes"
        )
    if number > _MOST_BYTES:
        raise ConfigError(
            f"{name}={shown(value)} is more than {format_bytes(_MOST_BYTES)}, which no GPU has; is its unit "
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
            f"{name}={shown(text)} is no size of memory{hint}. Units are {', '.join(UNITS)}; without one it "
            'is bytes. Examples: "2GiB", "1.5 GB", 2000000000'
        )
    return Decimal(found["number"]) * _BY_LOWER[unit or "b"]


def shown(value: object) -> str:
    """Return a value as a message has it: of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def a_value(value: object) -> str:
    """Return what a message says of a value of a wrong type."""
    return f"a value of type {type(value).__name__}"


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
CPUS: Final = _number(
    "a number of cores from 0.001 on, such as 0.5, 1 or 4", lambda x: 0.001 <= x < float("inf"), "X", float
)
TEXT: Final = Kind("a text that is not empty", "NAME", _filled)
SIZE: Final = Kind("a size such as 2GiB", "SIZE", _filled)
GPU_IDS: Final = Kind("GPU numbers or UUIDs such as 0,1", "LIST", _filled)
FOLDER: Final = Kind("a path", "DIR", _path, types=(str, Path))
#: The processes that read it may run in another folder.
ABSOLUTE_PATH: Final = Kind("a path", "DIR", lambda text: str(_path(text).resolve()))
#: Like :data:`ABSOLUTE_PATH` and :data:`PORT`, and the option may be repeated.
FOLDERS: Final = replace(ABSOLUTE_PATH, is_repeated=True)
PORTS: Final = replace(PORT, metavar="PORT", is_repeated=True)
TRUE_OR_FALSE: Final = Kind(
    "true or false",
    "true|false",
    lambda text: {"true": True, "false": False}.get(text),
    lambda v: v is not None,
)
#: ``key=value`` pairs in TOML; the option may be repeated.
PAIRS: Final = Kind("key=value pairs", "'K=V ...'", is_repeated=True)
#: ``--keep-going``; or ``--no-progress``, where the default is True.
SWITCH: Final = Kind("true or false", types=(bool,))


@dataclass(frozen=True)
class Option:
    """One option."""

    help: str
    kind: Kind | None = None  # None: checked where it is used
    variable: str | None = None
    default: Any = None  # with neither code nor variable
    group: str = ""  # its heading in --help
    commands: tuple[str, ...] = ()  # that have it
    node_key: str = ""  # of a SuperNode's --node-config
    is_nodes: bool = False  # the node has the last word: the variable goes before the code
    alone: str = ""  # the value of the option without one
    synonyms: tuple[str, ...] = ()  # options that mean the same, and that --help lists
    excludes: str = ""  # options with the same word exclude each other
    run_config_key: str = ""  # it stands for this key of the app's run config
    hint: str = ""  # for the author of an app that does not declare the key

    @property
    def words(self) -> tuple[str, ...] | None:
        """The only values it has."""
        return self.kind.words or None if self.kind else None


def table_of(annotated: type) -> dict[str, Option]:
    """Return the options of an annotated class, by the names of its fields."""
    return {
        name: meta
        for name, hint in get_type_hints(annotated, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, Option)
    }


def flag(name: str) -> str:
    """Return an option as it is written on a command line."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


#: The folder of an app that is not named.
HERE: Final = Path()


def add_app_folder(parser: argparse.ArgumentParser) -> None:
    """Add the folder of an app to a parser, as ``app_dir``."""
    parser.add_argument(
        "app_dir",
        metavar="APP_DIR",
        nargs="?",
        type=FOLDER,
        default=HERE,
        help="folder of the Flower app (default: this folder)",
    )


def add_arguments(
    parser: argparse.ArgumentParser,
    table: Mapping[str, Option],
    groups: Mapping[str, str] = _NOTHING,
    more: Mapping[str, str] = _NOTHING,
    defaults: Mapping[str, Any] = _NOTHING,
) -> None:
    """Add options to a parser.

    Parameters
    ----------
    parser : ArgumentParser
        Where they go.
    table : mapping of str to Option
        The options by name.
    groups : mapping of str to str
        What ``--help`` says about each group.
    more : mapping of str to str
        What this command's ``--help`` adds to an option.
    defaults : mapping of str to object
        Values of options that are not given; else None.
    """
    known: dict[str, Any] = {}
    for name, option in table.items():
        if option.group not in known:
            known[option.group] = (
                parser.add_argument_group(option.group, _about(option.group, table, groups))
                if option.group
                else parser
            )
        target = known[option.group]
        if option.excludes:
            if option.excludes not in known:
                known[option.excludes] = target.add_mutually_exclusive_group()
            target = known[option.excludes]
        help = f"{option.help}{more.get(name, '')}"
        if option.run_config_key:
            help += f" [{option.run_config_key}]"
        default = defaults.get(name)
        if option.kind is SWITCH:
            action = "store_false" if default else "store_true"
            written = flag(f"no_{name}" if default else name)
            target.add_argument(written, dest=name, action=action, help=help)
            continue
        kind: dict[str, Any] = {"dest": name, "default": default}
        if option.words:
            kind |= {"choices": option.words, "type": option.kind}
            kind |= {"nargs": "?", "const": option.alone} if option.alone else {}
        elif option.kind is not None and option.kind.is_repeated:
            kind |= {"metavar": option.kind.metavar, "type": option.kind, "action": "append", "default": []}
        elif option.kind is not None:
            kind |= {"metavar": option.kind.metavar, "type": option.kind}
        target.add_argument(flag(name), *map(flag, option.synonyms), help=help, **kind)


def _about(group: str, table: Mapping[str, Option], groups: Mapping[str, str]) -> str | None:
    """Return what ``--help`` says below a group's heading: about it, and what words of its options mean."""
    lines = [groups[group]] if groups.get(group) else []
    for name, option in table.items():
        if option.group == group and option.kind is not None and option.kind.meanings:
            width = max(map(len, option.kind.words))
            rows = zip(option.kind.words, option.kind.meanings, strict=True)
            lines += [f"{flag(name)} is one of:", *(f"  {word:{width}}  {meaning}" for word, meaning in rows)]
    return "\n".join(lines) or None
