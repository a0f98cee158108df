"""Has log lines and printed text appear above progress bars, in place of tearing them."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

_LOGGERS = ("", "flwr")  # Flower's does not pass on to the root's
_MOST_UNFINISHED = 65536  # characters of a line


class OutputAbove:
    """Redirects what goes to the terminal while bars are there.

    That is what the handlers of Flower's logger and of the root logger write, and ``sys.stdout``. Not
    ``sys.stderr``: bars of the app's own go there.

    Parameters
    ----------
    bar : type
        The class of the bars.
    bars_stream : TextIO
        Where they are drawn.
    """

    def __init__(self, bar: type[tqdm[Any]], bars_stream: TextIO) -> None:
        self._bar = bar
        self._bars_stream = bars_stream
        self._streams: list[_Above] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], Any, _Above]] = []
        self._stdout: tuple[TextIO, _Above] | None = None

    def begin(self) -> None:
        """Redirect."""
        for name in _LOGGERS:
            for handler in logging.getLogger(name).handlers:
                stream = getattr(handler, "stream", None)
                if isinstance(handler, logging.StreamHandler) and _is_terminal(stream):
                    above = self._above(stream)
                    handler.setStream(above)
                    self._handlers.append((handler, stream, above))
        if _is_terminal(sys.stdout):
            self._stdout = (sys.stdout, self._above(sys.stdout))
            sys.stdout = self._stdout[1]

    def end(self) -> None:
        """Undo that, where nobody else has put something in the place of ours."""
        for handler, stream, above in self._handlers:
            if handler.stream is above:
                handler.setStream(stream)
        if self._stdout is not None and sys.stdout is self._stdout[1]:
            sys.stdout = self._stdout[0]
        for above in self._streams:
            above.end()
        self._handlers, self._stdout, self._streams = [], None, []

    def _above(self, stream: Any) -> _Above:
        above = _Above(stream, self._bar, self._bars_stream)
        self._streams.append(above)
        return above


class _Above:
    """A stream whose lines appear above the bars."""

    def __init__(self, stream: Any, bar: type[tqdm[Any]], bars_stream: TextIO) -> None:
        self._stream = stream
        self._bar = bar
        self._bars_stream = bars_stream
        self._begun = ""  # a line that is not complete
        self._is_on = True
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            if not self._is_on or "\r" in text:  # that one draws itself
                self._stream.write(text)
            else:
                lines, newline, self._begun = (self._begun + text).rpartition("\n")
                if len(self._begun) > _MOST_UNFINISHED:  # a line that has no end
                    lines, newline, self._begun = lines + newline + self._begun, "\n", ""
                if newline:
                    # Not the bars' own write(): it knows sys.stdout as the same terminal only while that is
                    # not replaced.
                    with self._bar.external_write_mode(file=self._bars_stream):
                        self._stream.write(lines + newline)
                        self._stream.flush()
        return len(text)

    def end(self) -> None:
        """From now on just pass on: somebody may have kept this stream."""
        with self._lock:
            self._is_on = False
            if self._begun:
                self._stream.write(self._begun)
                self._begun = ""


def _is_terminal(stream: Any) -> bool:
    try:
        return not isinstance(stream, _Above) and bool(stream.isatty())
    except (AttributeError, ValueError):  # none, or closed
        return False
