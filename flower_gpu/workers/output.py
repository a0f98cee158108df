"""The output of a worker: read without blocking, shown to the user, and kept for error messages."""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import dropwhile, takewhile
from typing import TextIO

from flower_gpu.options import RUN_DIR_VARIABLE

_CHUNK = 65536
_MAX_PIPE = 1 << 20  # largest size of a pipe in bytes, /proc/sys/fs/pipe-max-size
_REMEMBERED_LINES = 1000
#: Largest number of bytes that one stream of one call writes into a file.
MOST_IN_A_FILE = 16 << 20
#: File in the run's folder with the output of a simulation's clients.
LOG_NAME = "clients.log"
_CUT = f"\n[flower-gpu: more than {MOST_IN_A_FILE >> 20} MiB; the rest of this call's output is left out]\n"
_TAIL_LINES = 30  # lines in an error message
_TAIL_COLUMNS = 500
_STACK_LINES = 15
_STACK_HEADING = "(most recent call first):"  # end of faulthandler's headings
# A traceback of Python has a comma before "in".
_STACK_LINE = re.compile(rf'{re.escape(_STACK_HEADING)}$|  File ".*", line \d+ in ', re.MULTILINE)

#: A function that gets the number of new lines of a worker, and returns the number of lines to show. Threads
#: of several workers may call it at the same time.
AdmitLines = Callable[[int], int]


def all_lines(count: int) -> int:
    """Admit every line."""
    return count


class Stream:
    """A pipe from a worker that is read in chunks without blocking."""

    def __init__(self, descriptor: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._on_data = on_data

    def read(self) -> bool:
        """Read one chunk, and return False at the end of the stream."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return True
        if data:
            self._on_data(data)
        return bool(data)

    def drain(self) -> None:
        """Read the present output only, because a process that escaped may go on writing."""
        with suppress(BlockingIOError):
            for _ in range(_MAX_PIPE // _CHUNK):
                data = os.read(self.descriptor, _CHUNK)
                if not data:
                    break
                self._on_data(data)
        self._on_data(b"")


class Tail:
    """The last lines of a worker's output, for error messages."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    def reader(self) -> Callable[[str], None]:
        """Return a function that takes the text of one stream, and keeps its last lines.

        An empty text ends the stream.
        """
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
        # The stacks of all threads may have hundreds of lines, innermost calls first. Show the innermost
        # calls of the thread that crashed, or of the main thread, which comes last, and some lines before and
        # after.
        current = next((n for n in headings if lines[n].startswith("Current thread")), headings[-1])
        stack = list(takewhile(_is_frame, lines[current + 1 :]))
        after = list(dropwhile(_is_frame, lines[headings[-1] + 1 :]))
        few = _TAIL_LINES // 3
        shown = [*lines[: headings[0]][-few:], lines[current], *stack[:_STACK_LINES], *after[-few:]]
        return "\n".join(shown)

    def _remember(self, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2]  # a progress bar overwrites its line
        self._lines.append(shown[-_TAIL_COLUMNS:])


def _is_frame(line: str) -> bool:
    return line.startswith("  ")


def echo(
    target: TextIO | None, tail: Tail, name: str | None = None, admit_lines: AdmitLines = all_lines
) -> Callable[[bytes], None]:
    """Return a function that passes a worker's output on to the caller's stream, and keeps the last lines.

    A file, such as the log of a run, gets at most :data:`MOST_IN_A_FILE` from one stream of a call, because
    an endless loop of prints would fill the disk. A terminal or a pipe gets everything. With a ``name``, only
    whole lines are shown, and each begins with the name. All lines go into the run's folder; the caller's
    stream gets the lines that ``admit_lines`` admits, without the stacks of a worker that crashed or hangs.
    The error of its call has these stacks.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    remember = tail.reader()
    folder = os.environ.get(RUN_DIR_VARIABLE) if name is not None else None
    is_file = _is_file(target)
    begun, remaining = "", MOST_IN_A_FILE

    def on_data(data: bytes) -> None:
        nonlocal begun, remaining
        text = decoder.decode(data)
        # Data that gives no text is the first part of a character. An empty text would end the stream.
        if text or not data:
            remember(text)
        if name is not None:
            text, begun = _named_lines(begun + text, name, is_end=not data)
        kept = text[:remaining] + _CUT * (0 < remaining < len(text))
        remaining = max(0, remaining - len(text))
        shown = kept if is_file else text
        _write(target, shown if name is None else _first_lines(_without_stacks(shown), admit_lines))
        if folder and kept:
            with suppress(OSError), open(os.path.join(folder, LOG_NAME), "ab", buffering=0) as file:  # noqa: PTH118
                file.write(kept.encode(errors="backslashreplace"))

    return on_data


def _without_stacks(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not _STACK_LINE.search(line))


def _first_lines(text: str, admit_lines: AdmitLines) -> str:
    """Return the first lines of a text, up to the admitted number."""
    count = text.count("\n")
    admitted = admit_lines(count) if count else 0
    return text if admitted >= count else "".join(f"{line}\n" for line in text.split("\n")[:admitted])


def _named_lines(text: str, name: str, *, is_end: bool) -> tuple[str, str]:
    """Return whole lines with a name in front, and the unfinished rest.

    Log lines have the name already. If a line overwrites itself, as a progress bar does, its last state is
    used.
    """
    *lines, begun = text.split("\n")
    begun = begun[:-1].rpartition("\r")[2] + begun[-1:]
    # The last line may lack a line end, and a long line may never end.
    if begun and (is_end or len(begun) > _CHUNK):
        lines, begun = [*lines, begun], ""
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return "".join(f"{line}\n" if name in line else f"{name}{line}\n" for line in shown), begun


def _write(target: TextIO | None, text: str) -> None:
    if target is not None and text:
        with suppress(OSError, ValueError, LookupError):  # closed, or with an unknown encoding
            target.write(_writable(text, target))
            target.flush()


def _is_file(target: TextIO | None) -> bool:
    try:
        return target is not None and stat.S_ISREG(os.fstat(target.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # a stream of a notebook, or a closed stream
        return False


def _writable(text: str, target: TextIO) -> str:
    encoding = getattr(target, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
