"""Standard streams that are closed: cron jobs and daemons may start a program so (``command >&- 2>&-``).

Two things go wrong then. Python has None in the place of the stream, so a method call raises AttributeError,
and ``print(..., file=sys.stderr)`` writes to standard output instead. And the next file that the process
opens gets the free number: a socket or memory file that is descriptor 1 is overwritten in a child that gets
its standard output there, or it receives what a library prints.

So a command opens all streams first, on ``/dev/null``. A library leaves the streams of its user's program as
they are, and only takes care that none of its own descriptors has such a number.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def fill() -> None:
    """Open ``/dev/null`` as each standard descriptor that is closed. Cheap enough for each call."""
    for number in range(len(_STREAMS)):
        with suppress(OSError):
            os.fstat(number)
            continue
        with suppress(OSError):  # without room for a file, what comes next says so
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, unless a thread was faster
            if opened < len(_STREAMS):
                os.set_inheritable(opened, True)
            else:
                os.close(opened)


def tell(text: str) -> None:
    """Print a text on standard error, if there is one that can be written to."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed, or nobody reads it: no reason to end a run
            print(text, file=sys.stderr, flush=True)


def open_missing() -> None:
    """Open each standard stream that is closed, for this program and for those that it starts."""
    fill()
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            # Not the descriptor of that number: something else may have been opened there at the start.
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
