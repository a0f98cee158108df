"""Arguments that the parsers of all commands share: tables of options, an app's folder, ``-v`` and ``-q``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.kinds import FOLDER, SWITCH, Kind
from flower_gpu.options import CALL, LIMITS, CallOptions, Option, flag

#: Option of commands that can also print their output for programs.
JSON: Final = MappingProxyType({"json": Option("print JSON", SWITCH, default=False)})


def _nothing_more(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


@dataclass(frozen=True)
class Command:
    """A command of ``flower-gpu``."""

    help: str
    description: str
    run: Callable[[argparse.Namespace], int]  # returns the exit status
    options: Mapping[str, Option] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)  # texts of ``--help`` about groups of options
    more: Mapping[str, str] = field(default_factory=dict)  # texts that ``--help`` adds to options
    takes_app: bool = False
    add: Callable[[argparse.ArgumentParser], None] = _nothing_more  # adds arguments that are in no table
    after_dashes: str = ""  # name of the program that gets the options after two dashes
    # True if the command must go on when standard output cannot be written to, because it does other work
    outlives_output: bool = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its parser."""
        if self.takes_app:
            parser.add_argument(
                "app_dir",
                metavar="APP_DIR",
                nargs="?",
                type=reader(FOLDER),
                default=Path(),
                help="folder of the Flower app (default: this folder)",
            )
        self.add(parser)
        add_options(parser, self.options, self.groups, self.more)


def reader(kind: Kind) -> Callable[[str], Any]:
    """Return a function with which argparse converts a text to a value of this kind."""

    def read(text: str) -> Any:
        try:
            value = kind.from_text(text, "")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from None
        return text if kind.keeps_text else value

    return read


def add_options(
    parser: argparse.ArgumentParser,
    table: Mapping[str, Option],
    groups: Mapping[str, str],
    more: Mapping[str, str],
) -> None:
    """Add options to a parser. The value of a missing option is None if a variable can set it.

    ``table``: options by name.
    ``groups``: texts of ``--help`` about groups of options.
    ``more``: texts that this command's ``--help`` adds to options.
    """
    known: dict[object, Any] = {"": parser}
    for name, option in table.items():
        if option.group not in known:
            known[option.group] = parser.add_argument_group(
                option.group, _description(option.group, table, groups)
            )
        target = known[option.group]
        if option.excludes:
            pair = frozenset((name, option.excludes))
            if pair not in known:
                known[pair] = target.add_mutually_exclusive_group()
            target = known[pair]
        _add_option(target, name, option, f"{option.described}{more.get(name, '')}")


def _add_option(target: Any, name: str, option: Option, help: str) -> None:
    assert option.kind is not None
    default = option.default if option.kind.keeps_text else option.default_value
    if option.variable:
        default = None
    if option.kind is SWITCH:
        written = flag(f"no_{name}" if default else name)
        action = "store_false" if default else "store_true"
        target.add_argument(written, dest=name, action=action, help=help)
        return
    more: dict[str, Any] = {"metavar": option.kind.metavar}
    if option.kind.words:
        more = {"choices": option.kind.words}
        more |= {"nargs": "?", "const": option.alone} if option.alone else {}
    elif option.kind.is_repeated:
        more |= {"action": "append"}
        default = []
    if option.run_config_key:
        help += f" [{option.run_config_key}]"
    names = map(flag, (name, *option.synonyms))
    target.add_argument(*names, dest=name, default=default, type=reader(option.kind), help=help, **more)


def _description(group: str, table: Mapping[str, Option], groups: Mapping[str, str]) -> str | None:
    """Return the text below a group's heading in ``--help``, with the meanings of its options' words."""
    lines = [groups[group]] if groups.get(group) else []
    for name, option in table.items():
        if option.group == group and option.kind is not None and option.kind.meanings:
            width = max(map(len, option.kind.words))
            rows = zip(option.kind.words, option.kind.meanings, strict=True)
            lines += [f"{flag(name)} is one of:", *(f"  {word:{width}}  {meaning}" for word, meaning in rows)]
    return "\n".join(lines) or None


def given_calls(arguments: argparse.Namespace) -> CallOptions:
    """Return the call options that were given on a command line."""
    values = {name: getattr(arguments, name, None) for name, option in CALL.items() if option.commands}
    return {name: value for name, value in values.items() if value is not None}  # type: ignore[return-value]


def given_limits(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables for limits of workers that were given on a command line."""
    values = {option.variable: getattr(arguments, name) for name, option in LIMITS.items()}
    return {variable: value for variable, value in values.items() if value is not None}


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add ``-v`` and ``-q``, which mean the same for all commands."""
    # They have no defaults, because a default of an action's parser would override a value before the action.
    group = parser.add_mutually_exclusive_group()
    for flags, value, text in (
        (("-v", "--verbose"), 1, "print more: also debug lines of the log"),
        (("-q", "--quiet"), -1, "print only the result and errors"),
    ):
        group.add_argument(
            *flags, dest="verbosity", action="store_const", const=value, default=argparse.SUPPRESS, help=text
        )


def verbosity(arguments: argparse.Namespace) -> int:
    """Return 1 for ``-v``, -1 for ``-q``, or 0."""
    return int(getattr(arguments, "verbosity", 0))


def is_quiet(arguments: argparse.Namespace) -> bool:
    """Return True if only the result and errors should be shown."""
    return verbosity(arguments) < 0
