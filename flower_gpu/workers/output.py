"""What a worker writes: read without blocking, shown to the user, and remembered for messages."""

from __future__ import annotations

import codecs
import os
import stat
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import dropwhile, takewhile
from typing import TextIO

from flower_gpu.options import RUN_DIR_VARIABLE

_CHUNK = 65536
_MAX_PIPE = 1 << 20  # bytes a pipe holds at most, /proc/sys/fs/pipe-max-size
_REMEMBERED_LINES = 1000
#: Bytes of one stream of one call that a file is given.
MOST_IN_A_FILE = 16 << 20
#: What clients of a simulation write, in the run's folder.
LOG_NAME = "clients.log"
_CUT = f"\n[flower-gpu: more than {MOST_IN_A_FILE >> 20} MiB; the rest of this call is not here]\n"
_TAIL_LINES = 30  # of them in a message
_TAIL_COLUMNS = 500
_STACK_LINES = 15
_STACK_HEADING = "(most recent call first):"  # faulthandler's

#: Takes the number of lines that a worker has written, and returns how many of them are shown: the first
#: ones. Threads of several workers may call it at the same time.
AdmitLines = Callable[[int], int]


def all_lines(count: int) -> int:
    """Admit every line."""
    return count


class Stream:
    """A pipe from the worker, read in whole chunks without blocking."""

    def __init__(self, descriptor: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._on_data = on_data

    def read(self) -> bool:
        """Take one chunk; return False at the end of the stream."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return True
        if data:
            self._on_data(data)
        return bool(data)

    def drain(self) -> None:
        """Take the output so far, and no more: a process that got away may go on writing."""
        with suppress(BlockingIOError):
            for _ in range(_MAX_PIPE // _CHUNK):
                data = os.read(self.descriptor, _CHUNK)
                if not data:
                    break
                self._on_data(data)
        self._on_data(b"")


class Tail:
    """The last lines of a worker's output, for messages."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    def reader(self) -> Callable[[str], None]:
        """Return a function that keeps the last lines of one stream; an empty text ends it."""
        unfinished = ""

        def take(text: str) -> None:
            nonlocal unfinished
            *lines, rest = (unfinished + text).split("\n")
            if rest and not text:
                lines, rest = [*lines, rest], ""
            unfinished = rest[-_CHUNK:]
            for line in lines:
                self._remember(line)

        return take

    def __str__(self) -> str:
        lines = list(self._lines)
        headings = [n for n, line in enumerate(lines) if line.endswith(_STACK_HEADING)]
        if not headings:
            return "\n".join(lines[-_TAIL_LINES:])
        # The stacks of all threads may be hundreds of lines, innermost calls first: show what the thread
        # that crashed is at, or the main thread, which is the last, and some lines from before and after.
        current = next((n for n in headings if lines[n].startswith("Current thread")), headings[-1])
        stack = list(takewhile(_is_frame, lines[current + 1 :]))
        after = list(dropwhile(_is_frame, lines[headings[-1] + 1 :]))
        few = _TAIL_LINES // 3
        shown = [*lines[: headings[0]][-few:], lines[current], *stack[:_STACK_LINES], *after[-few:]]
        return "\n".join(shown)

    def _remember(self, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2]  # a bar draws over itself
        self._lines.append(shown[-_TAIL_COLUMNS:])


def _is_frame(line: str) -> bool:
    return line.startswith("  ")


def echo(
    target: TextIO | None, tail: Tail, name: str | None = None, admit_lines: AdmitLines = all_lines
) -> Callable[[bytes], None]:
    """Pass a worker's output on to the caller's stream, and remember the last lines of it.

    A file, such as the log of a run, gets :data:`MOST_IN_A_FILE` of one stream of a call: a loop that prints
    without end would fill the disk. A terminal or a pipe gets all.
    With a ``name``, lines are whole and begin with it. All of them go into the run's folder; the caller's
    stream gets those that ``admit_lines`` admits.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    remember = tail.reader()
    folder = os.environ.get(RUN_DIR_VARIABLE) if name is not None else None
    is_file = _is_file(target)
    begun, left = "", MOST_IN_A_FILE

    def on_data(data: bytes) -> None:
        nonlocal begun, left
        text = decoder.decode(data)
        if text or not data:  # else it is the beginning of a letter
            remember(text)
        if name is not None:
            text, begun = _named_lines(begun + text, name, is_end=not data)
        kept = text[:left] + _CUT * (0 < left < len(text))
        left = max(0, left - len(text))
        shown = kept if is_file else text
        _write(target, shown if name is None else _first_lines(shown, admit_lines))
        if folder and kept:
            with suppress(OSError), open(os.path.join(folder, LOG_NAME), "ab", buffering=0) as file:  # noqa: PTH118
                file.write(kept.encode(errors="backslashreplace"))

    return on_data


def _first_lines(text: str, admit_lines: AdmitLines) -> str:
    """Return as many of the lines of a text as are admitted."""
    count = text.count("\n")
    admitted = admit_lines(count) if count else 0
    return text if admitted >= count else "".join(f"{line}\n" for line in text.split("\n")[:admitted])


def _named_lines(text: str, name: str, *, is_end: bool) -> tuple[str, str]:
    """Return whole lines with a name in front, and the unfinished rest.

    Log lines have the name already. Of a line that draws over itself, as a bar does, its last state is taken.
    """
    *lines, begun = text.split("\n")
    begun = begun[:-1].rpartition("\r")[2] + begun[-1:]
    if begun and (is_end or len(begun) > _CHUNK):  # of the last line, or of one without an end
        lines, begun = [*lines, begun], ""
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return "".join(f"{line}\n" if name in line else f"{name}{line}\n" for line in shown), begun


def _write(target: TextIO | None, text: str) -> None:
    if target is not None and text:
        with suppress(OSError, ValueError, LookupError):  # closed, or of no known encoding
            target.write(_writable(text, target))
            target.flush()


def _is_file(target: TextIO | None) -> bool:
    try:
        return target is not None and stat.S_ISREG(os.fstat(target.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # a notebook's, or closed
        return False


def _writable(text: str, target: TextIO) -> str:
    encoding = getattr(target, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
