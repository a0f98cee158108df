"""The main program of every benchmark: options, parts, the JSON file and the exit status."""

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
from statistics import median
from typing import Any, NoReturn

from benchmarks.shared import machine
from benchmarks.shared.member import QUICK
from benchmarks.shared.processes import BenchmarkError, end_servers, isolated, new_state_folder
from benchmarks.shared.weights import SMALLEST_MB

EXIT_USAGE = 2
_LARGEST_MB = 10_000.0

Options = argparse.Namespace
Figures = dict[str, Any]
Rows = list[dict[str, Any]]
Part = Callable[[Options, Figures], object]


class Parser(argparse.ArgumentParser):
    """Options of a benchmark. An error prints one line instead of the whole usage.

    Parameters
    ----------
    name : str
        Name of the benchmark's folder.
    description : str, optional
        Text of ``--help``.
    parts : sequence of str
        Parts that ``--only`` can select.
    quick : mapping
        Defaults of options under ``--quick``.
    full : mapping
        Defaults of the same options otherwise.
    """

    def __init__(
        self,
        name: str,
        description: str | None,
        parts: Iterable[str],
        *,
        quick: Mapping[str, Any] = {},
        full: Mapping[str, Any] = {},
    ) -> None:
        super().__init__(prog=f"benchmarks.{name}", description=description, allow_abbrev=False)
        self._quick, self._full = quick, full
        parts = list(parts)
        self.add_argument("--only", type=partial(chosen, parts), default=parts, metavar="PART,PART",
                          help=f"run only these parts: {', '.join(parts)}; default: all")  # fmt: skip
        self.add_argument("--quick", action="store_true",
                          help="run a tiny version as a test; its figures mean nothing")  # fmt: skip
        self.add_argument("--json", type=json_file, metavar="FILE",
                          help="write the figures to this file after each part")  # fmt: skip
        if "runs" in full:
            self.add_argument("--runs", type=positive, metavar="N",
                              help=f"number of runs per row; default: {full['runs']}")  # fmt: skip

    def parse(self) -> Options:
        """Return the options of the command line, with defaults filled in."""
        options = self.parse_args()
        if options.quick:
            os.environ[QUICK] = "1"
        for name, value in (self._quick if options.quick else self._full).items():
            if getattr(options, name, None) is None:
                setattr(options, name, value)
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (options: python -m {self.prog} --help)\n")


def run(
    parser: Parser,
    options: Options,
    parts: Mapping[str, Part],
    *,
    figures: Figures | None = None,
    around: AbstractContextManager[object] | None = None,
) -> int:
    """Run the selected parts one after the other and write the figures after each.

    A part that fails is listed in ``failed``. The figures of the other parts are kept.

    Parameters
    ----------
    parser, options
        The command line.
    parts : mapping
        Functions by part. Each adds its rows to the figures.
    figures : dict, optional
        Figures that are known before the first part.
    around : context manager, optional
        Entered before the first part. If it raises BenchmarkError, nothing is measured.

    Returns
    -------
    int
        Exit status: 0, 1 if a part failed, 2 if nothing could be measured, 130 after Ctrl-C.
    """
    if sys.platform != "linux":
        return _refuse(parser, "needs Linux, because it reads /proc")
    figures = {} if figures is None else figures
    figures |= {"quick": options.quick, "machine": machine.describe()}
    failed: dict[str, str] = {}
    try:
        with isolated(), around or nullcontext():
            for name in options.only:
                _run_part(parser, name, partial(parts[name], options, figures), failed)
                write(options, {**figures, "failed": failed})
    except BenchmarkError as error:
        return _refuse(parser, f"{error}; nothing measured")
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


def write(options: Options, figures: Figures) -> None:
    """Write figures to the file of ``--json``. Long parts call this themselves, in case they are cut off."""
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
        # A fork server that stays would be measured with the next part.
        end_servers()


def _refuse(parser: Parser, reason: str) -> int:
    print(f"{parser.prog}: {reason}", file=sys.stderr)
    return EXIT_USAGE


def in_turn(ways: Iterable[str], runs: int) -> Iterable[tuple[int, str]]:
    """Yield the run's number and a way, in reverse order in every second run."""
    ways = list(ways)
    for number in range(runs):
        for way in ways if number % 2 == 0 else reversed(ways):
            yield number, way


def medians(runs: Sequence[Mapping[str, float]], digits: int = 3) -> dict[str, float]:
    """Return the median of each figure over several runs."""
    return {name: round(median(run[name] for run in runs), digits) for name in runs[0]}


def chosen(known: Sequence[str], text: str) -> list[str]:
    """Return the comma-separated names in ``text``, in the order of ``known``."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return [name for name in known if name in names]


def sizes_mb(text: str) -> list[float]:
    """Return comma-separated sizes of weights in MB."""
    sizes = []
    for part in text.split(","):
        try:
            size_mb = float(part)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of MB") from None
        if not SMALLEST_MB <= size_mb <= _LARGEST_MB:
            raise argparse.ArgumentTypeError(f"{part} is not between {SMALLEST_MB:g} and {_LARGEST_MB:g} MB")
        sizes.append(size_mb)
    return sizes


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def positives(text: str) -> list[int]:
    """Return comma-separated whole numbers from 1 on."""
    return [positive(part) for part in text.split(",")]


def json_file(text: str) -> Path:
    """Return the path of a file that can be written."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or its folder does not exist")
    return path
