"""Values of Flower configs on a command line: ``key=value key="text"``, values as in TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from flower_gpu.errors import ConfigError

#: What Flower takes as a value in a run config and in a node config.
ConfigValue = bool | int | float | str

# A key, and a value that is quoted or has no spaces: what flwr.common.config.parse_config_args accepts, and
# escaped quotes.
_PAIR = re.compile(r"""([^\s="']+)=('[^']*'|"(?:[^"\\]|\\.)*"|[^\s"']\S*)(?=\s|$)""")


def parse_pairs(option: str, texts: Iterable[str]) -> dict[str, ConfigValue]:
    """Read ``key=value`` pairs.

    Parameters
    ----------
    option : str
        Where the texts come from, for the error message.
    texts : iterable of str
        Each holds pairs separated by spaces; later pairs win.

    Returns
    -------
    dict
        Values by key; the keys of tables joined by dots, as in Flower.

    Raises
    ------
    ConfigError
        If something is no pair, or no value that Flower takes.
    """
    values: dict[str, ConfigValue] = {}
    for text in texts:
        rest = _PAIR.sub("", text).split()
        if rest or not text.strip():
            raise ConfigError(
                f"{option}: {(rest or [text])[0]!r} is not of the form key=value "
                '(TOML values: 3, 0.1, true, "text")'
            )
        for key, value in _PAIR.findall(text):
            try:
                values.update(flatten(tomllib.loads(f"{key} = {value}")))
            except (tomllib.TOMLDecodeError, ValueError):
                raise ConfigError(
                    f"{option}: {key}={value} has no TOML number, true, false or quoted text "
                    f"(for a text write {key}='\"{value}\"')"
                ) from None
    return values


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, ConfigValue]:
    """Join the keys of nested tables by dots, as Flower does.

    Raises
    ------
    ValueError
        If a value is neither a table nor of a type that Flower takes.
    """
    flat: dict[str, ConfigValue] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif isinstance(value, bool | int | float | str):
            flat[prefix + key] = value
        else:
            raise ValueError(f"{prefix}{key} is a {type(value).__name__}")
    return flat


def format_pairs(values: Mapping[str, ConfigValue]) -> str:
    """Write pairs such that both TOML and Flower's own splitting at spaces and quotes read them back."""
    return " ".join(f"{key}={_format(value)}" for key, value in values.items())


def _format(value: ConfigValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # Flower ends a value at the next double quote, escaped or not: write quotes as \\u0022.
        escaped = "".join(
            f"\\u{ord(char):04x}" if char in '"\\' or ord(char) < 32 or ord(char) == 127 else char
            for char in value
        )
        return f'"{escaped}"'
    return repr(value)
