"""Metadata of a Flower app, read without importing the app, and config values on a command line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text

#: A value that Flower accepts in a run config and in a node config.
ConfigValue = bool | int | float | str

# A comma before the key of a pair, or between spaces. It was probably meant as a separator.
_COMMA = re.compile(r",\s*[\w.-]+=|\s,\s")
# A key and a value that is quoted or has no spaces. flwr.common.config.parse_config_args accepts the same,
# except for escaped quotes.
_PAIR = re.compile(r"""([^\s="']+)=('[^']*'|"(?:[^"\\]|\\.)*"|[^\s"']\S*)(?=\s|$)""")

_BYTE_ORDER_MARK: Final = "\ufeff"

#: Key of a run config that holds the number of clients. An app that declares it receives the number.
NUM_CLIENTS_KEY: Final = "num-clients"
#: Key of a run config that holds the number of rounds.
NUM_ROUNDS_KEY: Final = "num-server-rounds"


def with_rounds(
    run_config: Mapping[str, ConfigValue], rounds: int | None, option: str, run_config_option: str
) -> dict[str, ConfigValue]:
    """Return the values of a run config, with the number of rounds added unless it is None.

    ``option``, ``run_config_option``: names of the two options, for the text of an error.
    Raises ConfigError if the run config already has the number of rounds.
    """
    if rounds is None:
        return dict(run_config)
    if NUM_ROUNDS_KEY in run_config:
        raise ConfigError(
            f"{option} and {run_config_option} {NUM_ROUNDS_KEY} give the same setting twice: leave one out"
        )
    return {**run_config, NUM_ROUNDS_KEY: rounds}


@dataclass(frozen=True)
class FlowerApp:
    """The metadata of a Flower app, from its ``pyproject.toml``."""

    path: Path  # folder of the app, absolute
    name: str
    serverapp: str  # "package.module:attribute"
    clientapp: str
    run_config: Mapping[str, ConfigValue]  # defaults by declared key, nested keys joined by dots
    # Allowed values by key, from [tool.flower-gpu.choices]. Other keys accept any value.
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dependencies: tuple[str, ...] = ()  # required packages, as in ``[project]``

    def overrides(
        self,
        chosen: Mapping[str, ConfigValue],
        clients: int,
        said: Callable[[str], str] = "run config {}".format,
        hint: Callable[[str], str] = lambda _: "",
    ) -> dict[str, ConfigValue]:
        """Return the given values of the run config, with ``num-clients`` added if the app declares this key.

        ``said``: function that describes how a key was given, for errors.
        ``hint``: function that returns advice for a key that the app does not declare.

        Raises ConfigError if the app does not declare a key, or if a value is not among the choices of its
        key. A string is also refused if the app's default is a number or a boolean.
        """
        for key, value in chosen.items():
            if key not in self.run_config:
                known = ", ".join(sorted(self.run_config)) or "none"
                more = f"; {hint(key)}" if hint(key) else ""
                raise ConfigError(f"{said(key)}: {self.name} declares no such key (its keys: {known}){more}")
            allowed = self.choices.get(key)
            if allowed and str(value) not in allowed:
                raise ConfigError(f"{said(key)} {value}: {self.name} takes only {', '.join(allowed)}")
            default = self.run_config[key]
            if isinstance(value, str) and not isinstance(default, str):
                raise ConfigError(
                    f"{said(key)}={_format(value)} is a string, but {self.name} takes a number, true or "
                    f"false here: its default is {_format(default)}"
                )
        if NUM_CLIENTS_KEY not in self.run_config:
            return dict(chosen)
        if chosen.get(NUM_CLIENTS_KEY, clients) != clients:
            number = chosen[NUM_CLIENTS_KEY]
            raise ConfigError(
                f"{said(NUM_CLIENTS_KEY)}={number}, but there are {clients} clients; leave it out"
            )
        return {**chosen, NUM_CLIENTS_KEY: clients}

    def simulated(self, chosen: Mapping[str, ConfigValue], num_supernodes: int) -> dict[str, ConfigValue]:
        """Return the complete run config of a simulation. Raises ConfigError like :meth:`overrides`."""
        return {**self.run_config, **self.overrides(chosen, num_supernodes)}

    @classmethod
    def load(cls, folder: Path) -> FlowerApp:
        """Return the app in a folder. Raises ConfigError if the folder holds no Flower app."""
        path = folder.expanduser().resolve()
        file = path / "pyproject.toml"
        if not path.is_dir():
            raise ConfigError(f"{path_text(folder)} is not a folder")
        if not file.is_file():
            raise ConfigError(
                f"{path_text(folder)} has no pyproject.toml. Give the folder of a Flower app as APP_DIR, or "
                "run the command in that folder"
            )
        try:
            text = file.read_text(encoding="utf-8")
            if text.startswith(_BYTE_ORDER_MARK):
                raise ValueError(
                    "it begins with a byte order mark, which Flower, pip and uv refuse. Save it as UTF-8 "
                    "without BOM"
                )
            content = tomllib.loads(text)
        except (OSError, ValueError) as error:  # also UnicodeDecodeError and TOMLDecodeError
            raise ConfigError(f"{file} cannot be read: {error}") from None
        components = _table(content, "tool", "flwr", "app", "components")
        refs = [components.get(kind) for kind in ("serverapp", "clientapp")]
        if not all(isinstance(ref, str) and ref.count(":") == 1 for ref in refs):
            raise ConfigError(
                f"{path_text(folder)} is not a Flower app: {file} names no serverapp and clientapp "
                'as "module:attribute" in [tool.flwr.app.components]'
            )
        try:
            run_config = flatten(_table(content, "tool", "flwr", "app", "config"))
        except ValueError as error:
            raise ConfigError(f"{file}: run config: {error}; Flower takes int, float, bool, str") from None
        return cls(
            path=path,
            name=str(_table(content, "project").get("name", path.name)),
            serverapp=str(refs[0]),
            clientapp=str(refs[1]),
            run_config=MappingProxyType(run_config),
            choices=MappingProxyType(
                {
                    key: tuple(map(str, values))
                    for key, values in _table(content, "tool", "flower-gpu", "choices").items()
                    if isinstance(values, list)
                }
            ),
            dependencies=_texts(_table(content, "project").get("dependencies")),
        )


def _table(content: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        value = content.get(key)
        content = value if isinstance(value, Mapping) else {}
    return content


def _texts(values: object) -> tuple[str, ...]:
    return tuple(value for value in values if isinstance(value, str)) if isinstance(values, list) else ()


# Config values on a command line: ``key=value key="text"``, with values in TOML syntax


def parse_pairs(option: str, texts: Iterable[str]) -> dict[str, ConfigValue]:
    """Return the values by key from texts of ``key=value`` pairs.

    Nested keys are joined by dots, as in Flower.

    ``option``: name of the option that the texts come from, for the error message.
    ``texts``: texts of pairs separated by spaces. If a key occurs twice, the later value is used.
    Raises ConfigError for text that is not a pair, or for a value that Flower does not accept.
    """
    values: dict[str, ConfigValue] = {}
    for text in texts:
        try:
            values.update(_parse_text(text))
        except ValueError as error:
            problem = f"separate keys by spaces, not by commas: {text}" if _COMMA.search(text) else error
            raise ConfigError(f"{option}: {problem}") from None
    return values


def _parse_text(text: str) -> dict[str, ConfigValue]:
    rest = _PAIR.sub("", text).split()
    if rest or not text.strip():
        raise ValueError(
            f'{(rest or [text])[0]!r} is not of the form key=value (TOML values: 3, 0.1, true, "text")'
        )
    values: dict[str, ConfigValue] = {}
    for key, value in _PAIR.findall(text):
        try:
            values.update(flatten(tomllib.loads(f"{key} = {value}")))
        except ValueError:  # TOMLDecodeError is one
            raise ValueError(
                f"{key}={value}: {value} is not a TOML number, true, false or a quoted string "
                f"(for a string write {key}='\"{value}\"')"
            ) from None
    return values


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, ConfigValue]:
    """Return a table with the keys of nested tables joined by dots, as in Flower.

    Raises ValueError if a value is neither a table nor of a type that Flower accepts.
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
    """Return values as ``key=value`` pairs that both TOML and Flower's own parser read back unchanged."""
    return " ".join(f"{key}={_format(value)}" for key, value in values.items())


def _format(value: ConfigValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # Flower ends a value at the next double quote, even if it is escaped. So write quotes as \\u0022.
        escaped = "".join(
            f"\\u{ord(char):04x}" if char in '"\\' or ord(char) < 32 or ord(char) == 127 else char
            for char in value
        )
        return f'"{escaped}"'
    return repr(value)
