"""The trace of a run: events as JSON lines, which many processes append to one file.

Each line is written by a single ``write`` to a descriptor opened with ``O_APPEND``, so lines of different
processes do not mix. A process that is killed meanwhile can leave an incomplete line, which readers skip.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.options import RUN_DIR_VARIABLE

VERSION: Final = 1
FILE_NAME: Final = "trace.jsonl"
#: Values of ``task`` in events of rounds: training and evaluation by clients, and evaluation on the server.
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
SERVER_EVALUATE: Final = "server-evaluate"
#: Start of the ``error`` in a ``reply`` event if no reply came.
NO_REPLY: Final = "no reply"
#: One event, as docs/reference/trace.md describes it.
Event = Mapping[str, Any]
_START = f'{{"v": {VERSION}, "time": '  # start of each line
_START_BYTES = _START.encode()

_encode = json.JSONEncoder(default=str).encode  # json.dumps would create an encoder for each line

#: Texts for numbers in metrics that JSON does not have.
SPELLED: Final[Mapping[str, float]] = MappingProxyType(
    {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
)
# A pair of surrogates is one character, a lone surrogate is not a character. The last branch skips other
# escapes, such as an escaped backslash before "ud800".
_ESCAPE: Final = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|(?P<lone>ud[89a-f]..)|.)", re.IGNORECASE)


def spelled(number: float) -> float | str:
    """Return a number for metrics in the trace: a finite number as it is, others as a text."""
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def make(event: str, **fields: Any) -> Event:
    """Return an event with the present time."""
    return {"v": VERSION, "time": time.time(), "event": event, **fields}


def write(event: str, **fields: Any) -> None:
    """Append an event to the trace of the current run. Has no effect outside of a run."""
    folder = os.environ.get(RUN_DIR_VARIABLE)
    if folder:
        append(folder, make(event, **fields))


def write_to(folder: str | Path, event: str, **fields: Any) -> None:
    """Append an event to the trace in a folder."""
    append(folder, make(event, **fields))


def append(folder: str | Path, line: Event) -> None:
    """Append an event from :func:`make` to the trace in a folder."""
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
    """Keep the trace in a folder open, for a process that writes events of thousands of calls."""
    with suppress(OSError), _lock:
        _open[str(folder)] = _opened(folder)


def release(folder: Path) -> None:
    """Close the trace in a folder after :func:`keep_open`."""
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
    # Another thread of the parent may have held the lock. That thread does not exist in the fork.
    _lock = threading.Lock()
    while _open:
        os.close(_open.popitem()[1])


os.register_at_fork(after_in_child=_after_fork_in_child)


def read(
    path: Path, on_cut: Callable[[], None] = lambda: None, only: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace file, oldest first.

    ``on_cut``: called for each incomplete or invalid line, which is skipped.
    ``only``: name of the wanted events. Searching a long trace is ten times as fast as reading it.
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
    """Return the event in a line of a trace, or None if the line is incomplete or invalid."""
    text = line.decode("utf-8", errors="replace")
    event = _parse(text)
    # After an incomplete line, the line of the next process begins in the middle of this one.
    if event is None:
        event = _parse(text[max(text.rfind(_START), 0) :])
    return event if isinstance(event, dict) and event.get("v") == VERSION else None


class Follower:
    """Reads the new part of a trace or a log at each call. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._incomplete = b""  # start of a line without its end

    @property
    def position(self) -> int:
        """Number of bytes read so far."""
        return self._position

    @property
    def size(self) -> int:
        """Present size of the file in bytes, or 0 without a file."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def read_new(self, most_bytes: int = -1) -> list[dict[str, Any]]:
        """Return the events in the next ``most_bytes`` bytes, or in the rest of the file with -1."""
        return [event for line in self.read_lines(most_bytes) if (event := parse(line)) is not None]

    def read_lines(self, most_bytes: int = -1) -> list[bytes]:
        """Return the complete lines in the next ``most_bytes`` bytes, or in the rest of the file with -1."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read(most_bytes)
        except OSError:
            return []
        self._position += len(new)
        *lines, self._incomplete = (self._incomplete + new).split(b"\n")
        return lines


def _without_lone_surrogates(line: str) -> str:
    r"""Return a line of JSON with each lone surrogate replaced by the text of its escape.

    No reader can encode a lone surrogate. For example, an error may contain a file name that is not UTF-8.
    """
    if "\\ud" not in line and "\\uD" not in line:
        return line
    return _ESCAPE.sub(lambda match: f"\\\\{match['lone']}" if match["lone"] else match[0], line)


def _parse(text: str) -> Any:
    try:
        return json.loads(_without_lone_surrogates(text))
    except (ValueError, RecursionError):
        return None
