"""The ``flower-gpu`` command.

Only light modules are imported before a command runs, so ``--help`` also works in a Python without the
dependencies.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import platform
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, NoReturn

from flower_gpu import __version__, standard_streams
from flower_gpu.cli import (
    doctor,
    footprint,
    gpus,
    launch,
    leases,
    simulate,
    supernode,
    watching,
    workers,
)
from flower_gpu.cli.arguments import Command, add_verbosity, verbosity
from flower_gpu.errors import ConfigError, FlowerGPUError, GPUUnavailableError

COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "launch": launch.COMMAND,
        "simulate": simulate.COMMAND,
        "supernode": supernode.COMMAND,
        "gpus": gpus.COMMAND,
        "leases": leases.COMMAND,
        "top": watching.TOP,
        "footprint": footprint.COMMAND,
        "report": watching.REPORT,
        "metrics": watching.METRICS,
        "doctor": doctor.COMMAND,
        "workers": workers.COMMAND,
    }
)

#: Exit status for input that cannot be used.
EXIT_USAGE = 2
#: Exit status of other failures, with valid input.
EXIT_FAILED = 1


#: Flower reads the level of its log handler from this variable when it is imported.
_LEVEL_VARIABLE: Final = "FLWR_LOG_LEVEL"
_log = logging.getLogger("flwr.flower_gpu")


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser with ``-v`` and ``-q``. Its errors are one line, without the usage before it."""

    commands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        add_verbosity(self)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            # Since Python 3.14, argparse has an option for this (suggest_on_error).
            error.message += _suggestion(str(value), map(str, action.choices or ()))
            raise

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        standard_streams.flush_stdout()  # argparse ignores errors when it prints help.
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (options: {self.prog} --help)\n")


def build_parser() -> _Parser:
    """Return the parser of the command and all its subcommands."""
    parser = _Parser(
        prog="flower-gpu",
        description="GPU work of Flower clients in worker processes that give their memory back.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flower-gpu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(added)
    parser.commands = commands.choices
    return parser


def _suggestion(text: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the known word nearest to a mistyped one, or ""."""
    # Dashes are left out, because they make all options similar to each other.
    names = {name.strip("-"): name for name in known}
    matches = difflib.get_close_matches(text.strip("-"), names, n=1)
    return f"; did you mean {names[matches[0]]}?" if matches else ""


def _suggested_option(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the suggestion for the first of the unknown arguments that resembles an option of the parser."""
    names = [name for action in parser._actions for name in action.option_strings]
    suggestions = (_suggestion(text.partition("=")[0], names) for text in unknown if text.startswith("-"))
    return next(filter(None, suggestions), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status.

    The status is 0 for success, and 1 if a started process failed or standard output cannot be written to. It
    is 2 if the input cannot be used, and 128 + n if signal n ended the command.

    ``argv``: arguments without the program's name. By default, the arguments of the process.
    """
    standard_streams.open_missing()
    standard_streams.watch()
    try:
        parser = build_parser()
        arguments, unknown = parser.parse_known_args(argv)
        try:
            if unknown:
                suggestion = _suggested_option(parser.commands[arguments.command], unknown)
                others = COMMANDS[arguments.command].after_dashes
                dashes = f"; options of {others} go after two dashes, --" if others else ""
                options = f"options: flower-gpu {arguments.command} --help"
                raise ConfigError(f"unknown: {' '.join(unknown)}{dashes}{suggestion} ({options})")
            if argv is None and arguments.command == "simulate":
                simulate.begin_command(arguments)
            if COMMANDS[arguments.command].outlives_output:
                standard_streams.ignore_stdout_errors()
            status = _run(arguments)
            try:
                standard_streams.flush_stdout()
            except OSError:
                # A signal has ended the command, such as SIGHUP of a terminal that was closed.
                if status > 128:
                    standard_streams.discard_stdout()
                    return status
                raise
            return status
        except FlowerGPUError as error:
            print(f"flower-gpu {arguments.command}: {error}", file=sys.stderr)
            # GPUUnavailableError means that the option requires a GPU that this host does not have.
            return EXIT_USAGE if isinstance(error, ConfigError | GPUUnavailableError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        standard_streams.discard_stdout()
        return 128 + signal.SIGPIPE  # The reader of our output has exited, as with `| head`.
    except OSError:
        if not (reason := standard_streams.why_stdout_fails()):
            raise
        print(f"flower-gpu: {reason}", file=sys.stderr)
        standard_streams.discard_stdout()
        return EXIT_FAILED


def _run(arguments: argparse.Namespace) -> int:
    value = verbosity(arguments)
    # The processes of these commands have log files, and -q must not change their content.
    has_log_files = arguments.command == "launch" or getattr(arguments, "count", None) is not None
    with logged(value, to_children=value > 0 or not has_log_files):
        _log.debug("flower-gpu %s, Python %s, %s", __version__, platform.python_version(), sys.executable)
        return COMMANDS[arguments.command].run(arguments)


@contextmanager
def logged(value: int, *, to_children: bool) -> Iterator[None]:
    """Set the level of loggers for ``-v`` or ``-q`` within the block, even if Flower is imported later.

    ``value``: result of :func:`verbosity`.
    ``to_children``: whether the level also applies to processes started in the block.
    """
    if not value:
        yield
        return
    level = logging.DEBUG if value > 0 else logging.ERROR
    # Our loggers are children of this logger.
    logger, last = logging.getLogger("flwr"), logging.lastResort
    # If Flower has added its handler, the logger accepts all records, and the handler's level decides.
    limited: list[Any] = [*logger.handlers] or [logger, *([last] if last is not None else [])]
    previous = [target.level for target in limited]
    variable = os.environ.get(_LEVEL_VARIABLE)
    for target in limited:
        target.setLevel(level)
    if to_children:
        os.environ[_LEVEL_VARIABLE] = logging.getLevelName(level)
    try:
        yield
    finally:
        for target, previous_level in zip(limited, previous, strict=True):
            # If Flower was imported meanwhile, Flower has set the logger's level.
            if target is not logger or not logger.handlers:
                target.setLevel(previous_level)
        if variable is not None:
            os.environ[_LEVEL_VARIABLE] = variable
        else:
            os.environ.pop(_LEVEL_VARIABLE, None)
