"""Failed messages to clients: their records, the rule that ends a run, and the text for a run's outcome.

The problem: a bug in an app fails the messages of hundreds of clients. The user needs its traceback once, at
once, and the run should end if no client can succeed. All engines share this module:

- A :class:`Failure` is the record of one failed message.
- A :class:`FailureLog` keeps the failures of a run. The engine calls :meth:`FailureLog.add`, possibly from
  several threads. Each failure is written to ``failures.log``, and the first of each kind is also printed.
- :class:`AllFailed` is the rule that ends a run. The recorder of the run's rounds asks it after each set of
  replies. It does no I/O.

The *kind* of a failure is the type of its exception together with its place. The place is the innermost line
of the traceback that belongs neither to Python, nor to an installed library, nor to this package.

One lock in :class:`FailureLog` covers the decision if a kind is new and the write to the file. So two threads
with failures of the same kind print one traceback, and their records do not mix. Printing happens outside the
lock, so that a slow terminal does not delay other threads.
"""

from __future__ import annotations

import os
import re
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import flower_gpu
from flower_gpu import standard_streams
from flower_gpu.errors import shortened
from flower_gpu.printable import first_line, printable

COMPLETED: Final = "completed"

#: Label in front of an error that names task and client. Without it, the errors of many clients are equal.
LABEL: Final = re.compile(r"^\S+ of client (?P<client>\S+): ")

#: Maximum number of kinds whose first failure is printed.
_MAX_PRINTED: Final = 20
#: Maximum number of tracebacks that are remembered, so that the log refers to them instead of repeating them.
_MAX_KNOWN: Final = 1000
#: Number of consecutive rounds in which all clients fail before the run is ended.
_ROUNDS_IN_A_ROW: Final = 3
_EVALUATE: Final = "evaluate"
_INDENT: Final = "    "

_FRAME: Final = re.compile(r'^ *File "(?P<path>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
_TYPE: Final = re.compile(r"^(?P<type>[\w.]+)(:|$)")
_NUMBER: Final = re.compile(r"\d+")
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "<frozen ")
_PREFIXES: Final = tuple(
    f"{folder}/"
    for folder in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(flower_gpu.__file__).parent),
    }
)


@dataclass(frozen=True)
class Failure:
    """A message to a client that failed."""

    client: str
    task: str  # such as ``"train"``
    round: int | None
    error: str  # type and text of the exception, as ``"NameError: name 'Nett' is not defined"``
    traceback: str = ""  # empty if the worker was killed or got no lease
    time: float = field(default_factory=time.time)

    @classmethod
    def from_event(cls, event: Mapping[str, Any], client: str, traceback: str = "") -> Failure:
        """Return the failure that an event of a trace describes.

        ``traceback``: used if the event has no traceback.
        """
        number, at = event.get("round"), event.get("time")
        return cls(
            client=client,
            task=str(event.get("task")),
            round=number if type(number) is int else None,
            error=str(event.get("error") or event.get("outcome") or ""),
            traceback=str(event.get("traceback") or traceback),
            time=at if isinstance(at, float) else time.time(),
        )

    @property
    def kind(self) -> tuple[str, str]:
        """The type of the exception and its place. Without a traceback, the error's text is the place."""
        match = _TYPE.match(self.what)
        place = _place(self.traceback)
        if place is None:
            # Pids, clients and seconds differ between failures of the same kind, so numbers are replaced.
            place = _NUMBER.sub("#", _first_line(self.what))
        return (match["type"] if match else "", place)

    @property
    def title(self) -> str:
        """One line that names the task, the client and the round."""
        where = "" if self.round is None else f" in round {self.round}"
        return printable(f"{self.task} of client {self.client} failed{where}")

    @property
    def text(self) -> str:
        """The shortened traceback, or the shortened error for a failure without a traceback."""
        return shortened(LABEL.sub("", self.traceback) or self.what)

    @property
    def what(self) -> str:
        """The error without its label, because the client differs between failures of the same kind."""
        return LABEL.sub("", self.error)


class FailureLog:
    """The log of a run's failures, which also prints the first failure of each kind. Thread-safe.

    ``path``: the log file, which is created with the first failure; None for no file.
    ``say``: function that prints a text of one or more lines, by default to stderr.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._say = say or standard_streams.tell
        self._kinds: set[tuple[str, str]] = set()
        self._known: dict[bytes, str] = {}
        self._first: Failure | None = None
        self._lock = threading.Lock()

    def add(self, failure: Failure, *, is_said: bool = True) -> bool:
        """Write a failure to the log, and print it if it is the first of its kind and ``is_said`` is True.

        Returns True if the failure was printed.
        """
        kind = failure.kind
        with self._lock:
            self._first = self._first or failure
            is_new = is_said and kind not in self._kinds and len(self._kinds) < _MAX_PRINTED
            if is_new:
                self._kinds.add(kind)
            self._write(failure)
        if is_new:
            self._say("\n".join([f"{failure.title}:", *_lines(failure.text)]))
        return is_new

    @property
    def pointer(self) -> str:
        """The end of the sentence about the reason for ending a run: where to read the first failure."""
        if self._first is None:
            return "no reply gives a reason"
        return f"the first {'error' if _place(self._first.traceback) is None else 'traceback'} is above"

    def _write(self, failure: Failure) -> None:
        if self._path is None:
            return
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
        title = f"{at} {failure.title}"
        text = failure.text
        digest = sha256(text.encode(errors="replace")).digest()
        # A round of a thousand clients may fail a thousand times with the same traceback. Write it once.
        if digest in self._known:
            lines = [f"{title}: {_first_line(failure.what)} (same text as: {self._known[digest]})"]
        else:
            if len(self._known) < _MAX_KNOWN:
                self._known[digest] = failure.title.replace(" failed", "")
            lines = [f"{title}:", *(_INDENT + line for line in _lines(text))]
        data = "".join(f"{line}\n" for line in [*lines, ""]).encode()
        # Ignore a full disk here. It ends the run when files that matter cannot be written.
        with suppress(OSError):
            # Write each failure immediately, so that the log is complete even if the run is killed.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)


class AllFailed:
    """The rule that ends a run early if all clients fail, because such a run computes nothing.

    A run ends if every reply failed in the first round, or in three consecutive rounds that asked more than
    one client each. The messages of one kind (``"train"``, ``"query"``, ...) in one round are judged together
    when their last reply has arrived. If the messages of an app carry no round, each set of messages that it
    sends together counts as a round. Failed evaluations do not end a run if another task has succeeded.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._successful: set[str] = set()

    def replied(self, task: str, server_round: int | None, succeeded: int, failed: int) -> str | None:
        """Return the reason to end the run, such as ``"all 6 clients failed in round 1"``, or None.

        Call it with the counts of all messages of a kind in a round, as soon as they have their replies.
        A message without a reply counts neither as ``succeeded`` nor as ``failed``. The app may have stopped
        waiting for it.
        """
        if succeeded:
            self._in_a_row[task] = 0
            self._successful.add(task)
            return None
        if not failed or (task == _EVALUATE and self._successful - {task}):
            return None
        if failed == 1 and not server_round:
            # The message came before the first round, or the app asks one client after the other.
            return None
        is_first = task not in self._in_a_row
        previous = self._in_a_row.get(task, 0)
        if is_first or failed > 1:
            self._in_a_row[task] = previous + 1
        who = "the one client that was asked" if failed == 1 else f"all {failed} clients"
        where = "the first round" if server_round is None else f"round {server_round}"
        if is_first:
            return f"{who} failed in {where}"
        if failed > 1 and previous + 1 >= _ROUNDS_IN_A_ROW:
            where = "three rounds in a row" if server_round is None else f"{where} and the two rounds before"
            return f"{who} failed in {where}"
        return None

    def never_succeeded(self, failed: int) -> str | None:
        """Return why a finished run counts as failed if all its messages failed, otherwise None."""
        if self._successful or not failed:
            return None
        return "the only message failed" if failed == 1 else f"all {failed} messages failed"


def outcome_text(outcome: str, failed: int | None, messages: int | None) -> str:
    """Return the outcome of a run for a user, such as ``"completed, 3 of 60 messages failed"``.

    ``failed``, ``messages``: number of messages, or None if it is unknown.
    """
    if not failed or outcome != COMPLETED:
        return outcome
    of = f" of {messages:,}" if messages else ""
    return f"{outcome}, {failed:,}{of} message{'s' * ((messages or failed) != 1)} failed"


def _place(traceback: str) -> str | None:
    """Return file and line of the app's innermost frame. Without such a frame, use the innermost frame."""
    frames = [(match["path"], match["line"]) for match in _FRAME.finditer(traceback)]
    if not frames:
        return None
    app_frames = [
        (path, line)
        for path, line in frames
        if not path.startswith(_PREFIXES) and not any(part in path for part in _LIBRARIES)
    ]
    path, line = (app_frames or frames)[-1]
    return f"{path}:{line}"


def _lines(text: str) -> list[str]:
    return [printable(line.expandtabs(4)) for line in text.splitlines()]


def _first_line(text: str) -> str:
    return printable(shortened(first_line(text)))
