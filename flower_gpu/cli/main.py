"""The ``flower-gpu`` command.

This module imports no module that needs a dependency of the package. A command imports such modules when it
runs. So ``--help`` also works in a Python without the dependencies.
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

#: Exit status if the arguments, settings or files of the user are invalid.
EXIT_USAGE = 2
#: Exit status of a command that fails although its input is valid.
EXIT_FAILED = 1


#: Flower reads the level of its log handler from this variable when it is imported.
_LEVEL_VARIABLE: Final = "FLWR_LOG_LEVEL"
_log = logging.getLogger("flwr.flower_gpu")


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser with ``-v`` and ``-q``. It prints an error as one line, without the usage text."""

    commands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        add_verbosity(self)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            # Python 3.14 has an option for suggestions (suggest_on_error), but earlier versions do not.
            error.message += _suggestion(str(value), map(str, action.choices or ()))
            raise

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        # Raise an OSError if the help text could not be written, because argparse ignores such errors.
        standard_streams.flush_stdout()
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
    """Return "; did you mean ...?" with the known word most similar to ``text``, or "" if none is similar."""
    # Compare without dashes, because options would resemble each other by their dashes alone.
    names = {name.strip("-"): name for name in known}
    matches = difflib.get_close_matches(text.strip("-"), names, n=1)
    return f"; did you mean {names[matches[0]]}?" if matches else ""


def _suggested_option(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return a suggestion for the first unknown argument that resembles an option of the parser, or ""."""
    names = [name for action in parser._actions for name in action.option_strings]
    suggestions = (_suggestion(text.partition("=")[0], names) for text in unknown if text.startswith("-"))
    return next(filter(None, suggestions), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status.

    The status is 0 for success, 2 if the input is invalid, and 128 + n if signal n ended the command. It is 1
    for other failures, for example if a started process failed or standard output cannot be written to.

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
                program = COMMANDS[arguments.command].after_dashes
                dashes = f"; options of {program} go after two dashes, --" if program else ""
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
                # If a signal has ended the command, its status matters more than the lost output. For
                # example, closing a terminal sends SIGHUP and makes writing fail.
                if status > 128:
                    standard_streams.discard_stdout()
                    return status
                raise
            return status
        except FlowerGPUError as error:
            print(f"flower-gpu {arguments.command}: {error}", file=sys.stderr)
            # GPUUnavailableError is invalid input: an option asks for a GPU that this host does not have.
            return EXIT_USAGE if isinstance(error, ConfigError | GPUUnavailableError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        standard_streams.discard_stdout()
        # The reader of standard output has exited, as with `| head`.
        return 128 + signal.SIGPIPE
    except OSError:
        if not (reason := standard_streams.why_stdout_fails()):
            raise
        print(f"flower-gpu: {reason}", file=sys.stderr)
        standard_streams.discard_stdout()
        return EXIT_FAILED


def _run(arguments: argparse.Namespace) -> int:
    value = verbosity(arguments)
    # `launch` and `supernode --count` write the output of their child processes to log files. With -q, this
    # command prints less, but the log files must stay complete.
    has_log_files = arguments.command == "launch" or getattr(arguments, "count", None) is not None
    with logged(value, to_children=value > 0 or not has_log_files):
        _log.debug("flower-gpu %s, Python %s, %s", __version__, platform.python_version(), sys.executable)
        return COMMANDS[arguments.command].run(arguments)


@contextmanager
def logged(value: int, *, to_children: bool) -> Iterator[None]:
    """Set the log level for ``-v`` or ``-q`` within the block. It also applies if the block imports Flower.

    ``value``: result of :func:`verbosity`. It is positive for ``-v``, negative for ``-q``, and otherwise 0.
    ``to_children``: True to pass the level to processes that are started in the block.
    """
    if not value:
        yield
        return
    level = logging.DEBUG if value > 0 else logging.ERROR
    # All loggers of this package are children of Flower's logger. Without any handler, Python prints records
    # with its handler of last resort, which has a level too.
    logger, last = logging.getLogger("flwr"), logging.lastResort
    # If Flower is already imported, its logger accepts all records, and the level of its handler decides. So
    # set the level of that handler. Otherwise, set the levels of the logger and of the last resort.
    targets: list[Any] = [*logger.handlers] or [logger, *([last] if last is not None else [])]
    previous = [target.level for target in targets]
    variable = os.environ.get(_LEVEL_VARIABLE)
    for target in targets:
        target.setLevel(level)
    if to_children:
        os.environ[_LEVEL_VARIABLE] = logging.getLevelName(level)
    try:
        yield
    finally:
        for target, previous_level in zip(targets, previous, strict=True):
            # If the block has imported Flower, the logger has Flower's handler and level. Keep that level.
            if target is not logger or not logger.handlers:
                target.setLevel(previous_level)
        if variable is not None:
            os.environ[_LEVEL_VARIABLE] = variable
        else:
            os.environ.pop(_LEVEL_VARIABLE, None)
