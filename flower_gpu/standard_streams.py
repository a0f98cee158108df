"""Closed standard streams: cron jobs and daemons may start a program with ``>&- 2>&-``.

Two things go wrong then. Python sets the stream to None, so a method call raises AttributeError, and
``print(..., file=sys.stderr)`` writes to standard output instead. And the next file that the process opens
gets the free number. If a socket or memory file becomes descriptor 1, a child's standard output replaces it,
or the output of a library goes into it.

So a command opens all closed streams first, on ``/dev/null``. The library does not change the streams of its
user's program. It only fills the closed descriptors, so that its own files get other numbers.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def fill() -> None:
    """Open ``/dev/null`` on each closed standard descriptor. Takes a microsecond if all are open."""
    for number in range(len(_STREAMS)):
        with suppress(OSError):
            os.fstat(number)
            continue
        with suppress(OSError):  # If the process can open no more files, the caller's next step fails.
            # The lowest free number, unless another thread has just filled it.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened < len(_STREAMS):
                os.set_inheritable(opened, True)
            else:
                os.close(opened)


def tell(text: str) -> None:
    """Print a text on standard error. Does nothing if standard error is closed."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # A reader that has gone must not end a run.
            print(text, file=sys.stderr, flush=True)


def escape_unencodable() -> None:
    """Have standard output write escapes for characters that its encoding lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A fork may have a pipe in the place of a file. Python looks for its position when all else is done.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def open_missing() -> None:
    """Open each closed standard stream on ``/dev/null``, for this program and the programs that it starts."""
    fill()
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            # Not the descriptor of this number: an import may have opened another file there.
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
