"""Redirects log lines and printed text during a run: above the bars of a terminal, or into a file.

The problem: bars are drawn again and again in the last rows of a terminal. If another write reaches the
terminal, it tears the bars. A log handler keeps the stream of its creation, so it does not notice a new
``sys.stdout``.

The objects: :class:`OutputAbove` replaces these streams while the bars exist. Each replacement is an
``_Above``. It collects text up to the end of a line, and passes complete lines to the console of rich, which
prints them above the bars.

Races: any thread may log or print at any time, also while the bars are removed. So each ``_Above`` has a
reentrant lock. Other code may keep a replaced stream for longer than the bars exist. After
:meth:`OutputAbove.end`, such a stream passes all text on unchanged.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

_LOGGERS: Final = ("", "flwr")  # the logger of Flower does not propagate to the root logger
_MAX_LINE_CHARACTERS: Final = 65536
_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


class OutputAbove:
    """Redirects the log handlers of Flower and of the root logger, and ``sys.stdout``, above the bars.

    ``sys.stderr`` is not redirected, because the app may draw its own bars on it.
    """

    def __init__(self, console: Console) -> None:
        self._handlers: list[tuple[logging.StreamHandler[Any], _Above]] = []
        for name in _LOGGERS:
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler) and is_terminal(handler.stream):
                    above = _Above(handler.stream, console)
                    handler.setStream(above)
                    self._handlers.append((handler, above))
        self._stdout = _Above(sys.stdout, console) if is_terminal(sys.stdout) else None
        if self._stdout is not None:
            sys.stdout = self._stdout

    def end(self) -> None:
        """Restore the original streams, except for streams that other code has replaced since."""
        for handler, above in self._handlers:
            if handler.stream is above:
                handler.setStream(above.stream)
            above.end()
        if self._stdout is not None:
            if sys.stdout is self._stdout:
                sys.stdout = self._stdout.stream
            self._stdout.end()


class _Above:
    """A stream that prints its lines above the bars."""

    def __init__(self, stream: Any, console: Console) -> None:
        self.stream = stream
        self._console = console
        self._begun = ""  # text of an incomplete line
        self._is_on = True  # False once the text passes on unchanged
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        from rich.text import Text

        with self._lock:
            # A text with a carriage return is usually a bar of the app, which overwrites its own line.
            if not self._is_on or "\r" in text:
                self.stream.write(text)
                return len(text)
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            # A line without an end must not fill the memory.
            if len(self._begun) > _MAX_LINE_CHARACTERS:
                lines, newline, self._begun = lines + newline + self._begun, "\n", ""
        if newline:
            self._console.print(Text.from_ansi(lines), soft_wrap=True)
        return len(text)

    def end(self) -> None:
        """Write the incomplete line, and pass on all further text unchanged.

        Other code may keep and use this stream after the bars are gone.
        """
        with self._lock:
            self._is_on = False
            if self._begun:
                self.stream.write(self._begun)
                self._begun = ""


def is_terminal(stream: Any) -> bool:
    """Return True if a stream is an open terminal, and not redirected above the bars of one."""
    try:
        return not isinstance(stream, _Above) and bool(stream.isatty())
    except (AttributeError, ValueError):
        # The stream is None or closed.
        return False


@contextmanager
def flower_lines(are_shown: bool, path: Path | None) -> Iterator[None]:
    """Return a context that shows Flower's log lines, or appends them to a file.

    If they are not shown, the screen has only warnings and errors. Without a path, all other lines are
    discarded.
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
        # A full disk is reported by other code, for which the file is essential.
        with suppress(OSError):
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
