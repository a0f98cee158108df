"""What happened in a run, as JSON lines that many processes append to one file.

A line is written by a single ``write`` to a descriptor opened with ``O_APPEND``, so lines of different
processes do not mix; a process killed in between can leave a torn last line, which readers skip.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.options import RUN_DIR_VARIABLE

VERSION: Final = 1
FILE_NAME: Final = "trace.jsonl"
#: ``task`` of rounds: what Flower's strategies ask clients for, and an evaluation that sends no messages.
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
SERVER_EVALUATE: Final = "server-evaluate"
#: How the ``error`` of a ``reply`` begins if there was no reply.
NO_REPLY: Final = "no reply"
#: One event, as docs/reference/trace.md describes it.
Event = Mapping[str, Any]
_START = f'{{"v": {VERSION}, "time": '  # of every line
_START_BYTES = _START.encode()

_encode = json.JSONEncoder(default=str).encode  # made once: json.dumps makes a new one for each line

#: How the trace spells numbers that JSON does not have, in metrics.
SPELLED: Final[Mapping[str, float]] = MappingProxyType(
    {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
)
# A pair is one character, a lone surrogate is none. An escaped backslash may stand before "ud800".
_ESCAPE: Final = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|(?P<lone>ud[89a-f]..)|.)", re.IGNORECASE)


def spelled(number: float) -> float | str:
    """Return a number as metrics in the trace have it: one that is not finite as a text."""
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def make(event: str, **fields: Any) -> Event:
    """Return one event of this moment."""
    return {"v": VERSION, "time": time.time(), "event": event, **fields}


def write(event: str, **fields: Any) -> None:
    """Append one event to the trace of the current run; do nothing outside of a run."""
    folder = os.environ.get(RUN_DIR_VARIABLE)
    if folder and not _here.is_muted:
        append(folder, make(event, **fields))


class _Here(threading.local):
    is_muted = False


_here = _Here()


@contextmanager
def muted() -> Iterator[None]:
    """Let :func:`write` do nothing in this thread: the block is no part of the run."""
    _here.is_muted = True
    try:
        yield
    finally:
        _here.is_muted = False


def write_to(folder: str | Path, event: str, **fields: Any) -> None:
    """Append one event to the trace in a folder."""
    append(folder, make(event, **fields))


def append(folder: str | Path, line: Event) -> None:
    """Append an event that was made before."""
    data = f"{_without_lone_surrogates(_encode(line))}\n".encode()
    with suppress(OSError):  # a removed folder or a full disk must not end a training run
        if _open:
            with _lock:
                if (descriptor := _open.get(str(folder))) is not None:
                    os.write(descriptor, data)
                    return
        descriptor = _opened(folder)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def keep_open(folder: Path) -> None:
    """Keep the trace in a folder open: this process has three events for each of thousands of calls."""
    with suppress(OSError), _lock:
        _open[str(folder)] = _opened(folder)


def let_go(folder: Path) -> None:
    """Close it again."""
    with _lock:
        if (descriptor := _open.pop(str(folder), None)) is not None:
            os.close(descriptor)


_lock = threading.Lock()
_open: dict[str, int] = {}


def _opened(folder: str | Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    return os.open(os.path.join(folder, FILE_NAME), flags, 0o644)  # noqa: PTH118 - three times for each call


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it does not exist here
    while _open:
        os.close(_open.popitem()[1])


os.register_at_fork(after_in_child=_after_fork_in_child)


def read(
    path: Path, on_cut: Callable[[], None] = lambda: None, only: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace file, oldest first; skip torn or foreign lines, and call ``on_cut``.

    With ``only`` events of one name: a long trace is searched ten times as fast as it is read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if only is not None and only.encode() not in line:
                continue
            event = parse(line)
            if event is None or not line.startswith(_START_BYTES):
                on_cut()
            if event is not None and only in (None, event.get("event")):
                yield event


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of a trace; None where it is torn or not ours."""
    text = line.decode("utf-8", errors="replace")
    event = _parse(text)
    if event is None:  # torn; then the next process's line begins in the middle of it
        event = _parse(text[max(text.rfind(_START), 0) :])
    return event if isinstance(event, dict) and event.get("v") == VERSION else None


class Follower:
    """Reads the new part of a trace, or of a log; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._torn = b""

    @property
    def position(self) -> int:
        """How many bytes of the file have been read."""
        return self._position

    @property
    def size(self) -> int:
        """How many bytes the file has now; 0 where there is none."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def read_new(self, most_bytes: int = -1) -> list[dict[str, Any]]:
        """Return new events of the next ``most_bytes`` (-1: of all)."""
        return [event for line in self.read_lines(most_bytes) if (event := parse(line)) is not None]

    def read_lines(self, most_bytes: int = -1) -> list[bytes]:
        """Return new lines of the next ``most_bytes``; a line without its end waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read(most_bytes)
        except OSError:
            return []
        self._position += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        return lines


def _without_lone_surrogates(line: str) -> str:
    r"""Return a line of JSON in which a lone surrogate is the text of its escape: no reader can encode it.

    A file name that is not UTF-8 brings one into an error, for example.
    """
    if "\\ud" not in line and "\\uD" not in line:
        return line
    return _ESCAPE.sub(lambda found: f"\\\\{found['lone']}" if found["lone"] else found[0], line)


def _parse(text: str) -> Any:
    try:
        return json.loads(_without_lone_surrogates(text))
    except (ValueError, RecursionError):
        return None
