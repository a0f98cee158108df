"""Writes Flower's log lines into a file, in place of the screen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


@contextmanager
def flower_lines(are_shown: bool, path: Path | None) -> Iterator[None]:
    """Show Flower's log lines while in the context, or append them to a file.

    In the latter case the screen shows warnings and errors only. Without a file the other lines are nowhere.
    """
    if are_shown:
        yield
        return
    logger = logging.getLogger("flwr")
    shown = [
        handler
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    ]
    levels = [handler.level for handler in shown]
    file = None
    if path is not None:
        with suppress(OSError):  # a full disk is told by what needs it more
            file = logging.FileHandler(path, encoding="utf-8", delay=True)
            file.setFormatter(logging.Formatter(_FORMAT))
            logger.addHandler(file)
    for handler in shown:
        handler.setLevel(max(handler.level, logging.WARNING))
    try:
        yield
    finally:
        for handler, level in zip(shown, levels, strict=True):
            handler.setLevel(level)
        if file is not None:
            logger.removeHandler(file)
            file.close()
