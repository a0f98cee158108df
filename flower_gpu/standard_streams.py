"""Standard streams that are closed, or that cannot be written to.

Cron jobs and daemons may start a program with ``>&- 2>&-``. Two things go wrong then. Python sets the stream
to None, so a method call raises AttributeError, and ``print(..., file=sys.stderr)`` writes to standard output
instead. And the next file that the process opens gets the free number. If a socket or memory file becomes
descriptor 1, a child's standard output replaces it, or the output of a library goes into it.

So a command opens all closed streams first, on ``/dev/null``. The library does not change the streams of its
user's program. It only fills the closed descriptors, so that its own files get other numbers.

An open stream fails if its disk is full, or if the reader of its pipe has gone (``| head -1``). What follows
depends on the stream and on the command:

- Standard error has messages. Their loss changes nothing, not even the exit status.
- Standard output is the result of a command such as ``leases``, which fails without it. A run goes on,
  because its results are in files.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

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


def open_missing() -> None:
    """Open each closed standard stream on ``/dev/null``, for this program and the programs that it starts."""
    fill()
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            # Not the descriptor of this number: an import may have opened another file there.
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _StandardFile(io.FileIO):
    """File of a standard stream. It keeps the error of the last write that failed.

    ``is_lossy``: True if a failed write loses its data and raises nothing.
    """

    error: OSError | None = None

    def __init__(self, descriptor: int, *, is_lossy: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.is_lossy = is_lossy

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            is_first, self.error = self.error is None, error
            if not self.is_lossy:
                raise
        if is_first and self is not _watched.get("stderr") and self.error.errno != errno.EPIPE:
            tell(f"flower-gpu: {why_stdout_fails()}. The command continues without it")
        return memoryview(data).nbytes


_watched: dict[str, _StandardFile] = {}
# The streams before. Freeing one that open_missing() has made would close its descriptor.
_replaced: list[Any] = []


def watch() -> None:
    """Record errors of standard output in this program, and ignore errors of standard error.

    Both streams write escapes for characters that their encoding lacks, as Python's standard error does.
    A stream that is not Python's own, such as a notebook's, stays as it is.
    """
    _watched.clear()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        with suppress(OSError):
            stream.flush()
        _watched[name] = file = _StandardFile(stream.fileno(), is_lossy=name == "stderr")
        is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
        new = io.TextIOWrapper(
            file if is_unbuffered else io.BufferedWriter(file),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        _replaced.append(stream)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def ignore_stdout_errors() -> None:
    """Discard what cannot be written to standard output, and say so once, unless the reader has gone."""
    if "stdout" in _watched:
        _watched["stdout"].is_lossy = True


def flush_stdout() -> None:
    """Flush standard output. Raises OSError if this write or an earlier one has failed."""
    sys.stdout.flush()
    file = _watched.get("stdout")
    if file is not None and file.error is not None and not file.is_lossy:
        raise file.error


def why_stdout_fails() -> str:
    """Return the reason why standard output cannot be written to, or ""."""
    error = _watched["stdout"].error if "stdout" in _watched else None
    return f"cannot write to standard output: {error.strerror}" if error is not None else ""


def discard_stdout() -> None:
    """Send the rest of the buffer to ``/dev/null``. Python flushes it at exit, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
