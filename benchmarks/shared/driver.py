"""The frame of every benchmark: its options, its parts one after the other, its figures, its exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.shared import machine
from benchmarks.shared.member import QUICK
from benchmarks.shared.processes import BenchmarkError, end_servers, new_state_folder, nothing_left_behind
from benchmarks.shared.weights import SMALLEST_MB

EXIT_USAGE = 2
_LARGEST_MB = 10_000.0

Options = argparse.Namespace
Figures = dict[str, Any]
Part = Callable[[Options, Figures], object]


class Parser(argparse.ArgumentParser):
    """The options of a benchmark. Errors are one line, without the whole usage in front.

    Parameters
    ----------
    name : str
        The folder of the benchmark.
    description : str, optional
        Its docstring.
    parts : sequence of str
        What ``--only`` can choose; without parts there is no such option.
    quick : mapping, optional
        What ``--quick`` sets, if the option itself is not given; without it there is no such option.
    full : mapping
        What is set otherwise.
    """

    def __init__(
        self,
        name: str,
        description: str | None,
        parts: Sequence[str] = (),
        *,
        quick: Mapping[str, Any] | None = None,
        full: Mapping[str, Any] = {},
    ) -> None:
        super().__init__(prog=f"benchmarks.{name}", description=description, allow_abbrev=False)
        self._quick, self._full = quick, full
        if parts:
            self.add_argument("--only", type=partial(chosen, parts), default=list(parts), metavar="PART,PART",
                              help=f"some of {', '.join(parts)}; default: all")  # fmt: skip
        if quick is not None:
            self.add_argument("--quick", action="store_true",
                              help="tiny: shows that everything runs, the figures mean nothing")  # fmt: skip
        self.add_argument("--json", type=json_file, metavar="FILE",
                          help="also write the figures there, after each part")  # fmt: skip

    def parse(self) -> Options:
        options = self.parse_args()
        if getattr(options, "quick", False):
            os.environ[QUICK] = "1"
        for name, value in (self._quick if self._quick and options.quick else self._full).items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (options: python -m {self.prog} --help)\n")


def run(
    parser: Parser,
    options: Options,
    parts: Mapping[str, Part],
    figures: Figures,
    *,
    around: AbstractContextManager[object] | None = None,
    after: Callable[[Figures], object] = lambda _: None,
) -> int:
    """Run the parts, each with nothing left of the one before, and write the figures down after each.

    A part that fails is named in ``failed``, and the figures of the others are not lost.

    Parameters
    ----------
    parser, options, parts
        What to run; with ``--only``, some of the parts.
    figures : dict
        What the parts add to, and ``machine``.
    around : context manager, optional
        What all parts need. If it cannot be had, nothing is measured.
    after : callable, optional
        Gets the figures after each part.

    Returns
    -------
    int
        The exit status: 0, or 1 if a part failed, 2 where nothing can be measured, 130 after Ctrl-C.
    """
    if sys.platform != "linux":
        return _refuse(parser, "needs Linux: it reads /proc")
    figures["machine"] = machine.describe()
    failed: dict[str, str] = {}
    try:
        with nothing_left_behind(), around or nullcontext():
            for name in getattr(options, "only", parts):
                _run_part(parser, name, partial(parts[name], options, figures), failed)
                write(options, {**figures, "failed": failed})
                after(figures)
    except BenchmarkError as error:
        return _refuse(parser, f"{error}; nothing measured")
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


def write(options: Options, figures: Figures) -> None:
    """Write figures into the file of ``--json``; a long part does so itself, for it may be cut off."""
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _run_part(parser: Parser, name: str, part: Callable[[], object], failed: dict[str, str]) -> None:
    new_state_folder()
    try:
        part()
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
        print(f"{parser.prog}: {name}: {error}", file=sys.stderr)
        if not isinstance(error, BenchmarkError):
            traceback.print_exc()
    finally:
        end_servers()  # one would be counted with the next part


def _refuse(parser: Parser, reason: str) -> int:
    print(f"{parser.prog}: {reason}", file=sys.stderr)
    return EXIT_USAGE


def in_turn(ways: Iterable[str], runs: int) -> Iterable[tuple[int, str]]:
    """Yield the number of the run and a way, every other time from the last way to the first."""
    ways = list(ways)
    for number in range(runs):
        for way in ways if number % 2 == 0 else reversed(ways):
            yield number, way


def chosen(known: Sequence[str], text: str) -> list[str]:
    """Return the names in ``text``, in the order of ``known``."""
    asked = text.split(",")
    for name in asked:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return [name for name in known if name in asked]


def sizes_mb(text: str) -> list[float]:
    """Return sizes of weights."""
    found = []
    for part in text.split(","):
        try:
            size_mb = float(part)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of MB") from None
        if not SMALLEST_MB <= size_mb <= _LARGEST_MB:
            raise argparse.ArgumentTypeError(f"{part} is not between {SMALLEST_MB:g} and {_LARGEST_MB:g} MB")
        found.append(size_mb)
    return found


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def positives(text: str) -> list[int]:
    """Return whole numbers from 1 on."""
    return [positive(part) for part in text.split(",")]


def json_file(text: str) -> Path:
    """Return a file that can be written."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or in none that exists")
    return path
