"""Types of command-line options, with errors that say what can be given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from weights import SMALLEST_MB

EXIT_USAGE = 2
_LARGEST_MB = 10_000.0


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the whole usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (options: {self.prog} --help)\n")


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


def json_file(text: str) -> Path:
    """Return a file that can be written."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or in none that exists")
    return path
