"""How much a command says: ``-v`` and ``-q``, which mean the same for all of them."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

#: What Flower takes its handler's level from, when it is imported.
VARIABLE: Final = "FLWR_LOG_LEVEL"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add both options."""
    # Without defaults: they may stand before a command's own action, and behind it.
    group = parser.add_mutually_exclusive_group()
    for flags, value, text in (
        (("-v", "--verbose"), 1, "say more: debug lines of the log, too"),
        (("-q", "--quiet"), -1, "say the result only, and errors"),
    ):
        group.add_argument(
            *flags, dest="verbosity", action="store_const", const=value, default=argparse.SUPPRESS, help=text
        )


def verbosity(arguments: argparse.Namespace) -> int:
    """Return 1 for ``-v``, -1 for ``-q``, and else 0."""
    return int(getattr(arguments, "verbosity", 0))


def is_quiet(arguments: argparse.Namespace) -> bool:
    """Tell whether only the result and errors are to be said."""
    return verbosity(arguments) < 0


@contextmanager
def applied(value: int, *, to_children: bool = True) -> Iterator[None]:
    """Let loggers keep to it in the context, whether Flower is imported already, later, or never.

    ``value``: as :func:`verbosity` returns it.
    ``to_children``: whether processes that are started meanwhile keep to it as well.
    """
    if not value:
        yield
        return
    level = logging.DEBUG if value > 0 else logging.ERROR
    logger, last = logging.getLogger("flwr"), logging.lastResort  # ours are below it
    # With a handler, Flower's, the logger takes everything and the handler decides.
    limited: list[Any] = [*logger.handlers] or [logger, *([last] if last is not None else [])]
    before = [each.level for each in limited]
    variable = os.environ.get(VARIABLE)
    for each in limited:
        each.setLevel(level)
    if to_children:
        os.environ[VARIABLE] = logging.getLevelName(level)
    try:
        yield
    finally:
        for each, was in zip(limited, before, strict=True):
            if each is not logger or not logger.handlers:  # with Flower imported meanwhile it is Flower's
                each.setLevel(was)
        if variable is not None:
            os.environ[VARIABLE] = variable
        else:
            os.environ.pop(VARIABLE, None)
