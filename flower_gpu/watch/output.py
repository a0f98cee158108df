"""Where log lines and printed text go while a run is shown: above the bars of a terminal, or into a file."""

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

_LOGGERS: Final = ("", "flwr")  # Flower's does not pass on to the root's
_MOST_UNFINISHED: Final = 65536  # characters of a line
_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


class OutputAbove:
    """Redirects what the handlers of Flower's logger and of the root logger write, and ``sys.stdout``.

    Not ``sys.stderr``: bars of the app's own go there.
    """

    def __init__(self, console: Console) -> None:
        self._handlers: list[tuple[logging.StreamHandler[Any], _Above]] = []
        for name in _LOGGERS:
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler) and _is_terminal(handler.stream):
                    above = _Above(handler.stream, console)
                    handler.setStream(above)
                    self._handlers.append((handler, above))
        self._stdout = _Above(sys.stdout, console) if _is_terminal(sys.stdout) else None
        if self._stdout is not None:
            sys.stdout = self._stdout

    def end(self) -> None:
        """Undo that, where nobody else has put something in the place of ours."""
        for handler, above in self._handlers:
            if handler.stream is above:
                handler.setStream(above.stream)
            above.end()
        if self._stdout is not None:
            if sys.stdout is self._stdout:
                sys.stdout = self._stdout.stream
            self._stdout.end()


class _Above:
    """A stream whose lines appear above the bars."""

    def __init__(self, stream: Any, console: Console) -> None:
        self.stream = stream
        self._console = console
        self._begun = ""  # a line that is not complete
        self._is_on = True
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        from rich.text import Text

        with self._lock:
            if not self._is_on or "\r" in text:  # that one draws itself
                self.stream.write(text)
                return len(text)
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if len(self._begun) > _MOST_UNFINISHED:  # a line that has no end
                lines, newline, self._begun = lines + newline + self._begun, "\n", ""
        if newline:
            self._console.print(Text.from_ansi(lines), soft_wrap=True)
        return len(text)

    def end(self) -> None:
        """From now on just pass on: somebody may have kept this stream."""
        with self._lock:
            self._is_on = False
            if self._begun:
                self.stream.write(self._begun)
                self._begun = ""


def _is_terminal(stream: Any) -> bool:
    try:
        return not isinstance(stream, _Above) and bool(stream.isatty())
    except (AttributeError, ValueError):  # none, or closed
        return False


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
