"""Log lines of a worker say whose they are: Flower's and ours, not those of loggers of the task's own."""

from __future__ import annotations

import logging
from typing import Final

#: Of our own lines: below Flower's, whose handler and format they have where Flower is imported.
NAME: Final = "flwr.flower_gpu"

_LOGGERS: Final = ("flwr", NAME)


class _Prefix:
    """Puts a text in front of the messages of loggers that have it as a filter."""

    def __init__(self) -> None:
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if self.text and record.msg != "":
            # With arguments the message is a template, and a % in a client's name would be a part of it.
            text = self.text.replace("%", "%%") if record.args else self.text
            try:
                record.msg = f"{text}{record.msg}"
            except Exception:  # not a text, and cannot be one: the handler says so
                return True
        return True


_prefix = _Prefix()


def begin(text: str) -> None:
    """Put a text in front of all that follows, in the place of the one before.

    ``text``: such as ``"client 3, round 2: "``; empty: nothing.
    """
    if text and not _prefix.text:
        for name in _LOGGERS:  # a logger has a filter once, however often it is added
            logging.getLogger(name).addFilter(_prefix)
    _prefix.text = text


def current() -> str:
    """Return the text that is put in front now."""
    return _prefix.text
