"""Messages to clients that failed: the records of them, the rule that ends a run, the words for its outcome.

Shared by all engines: the recorder of a run's rounds judges whether all clients fail, and an engine keeps and
shows the failures.

A failure is of a *kind*: the type of its exception and its place, which is the innermost line of the
traceback that is neither Python's, nor an installed library's, nor ours. Of each kind the first traceback is
printed. All failures are in ``failures.log``.
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

#: What calls put in front of an error: without it, the same failure of many clients is one.
LABEL: Final = re.compile(r"^\S+ of client (?P<client>\S+): ")

_MOST_PRINTED: Final = 20  # kinds
_MOST_KNOWN: Final = 1000  # tracebacks that need not be written again
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
    """One message to a client that failed."""

    client: str
    task: str  # such as ``"train"``
    round: int | None
    error: str  # type and text of the exception, as ``"NameError: name 'Nett' is not defined"``
    traceback: str = ""  # empty where there is none: the worker was killed, or there was no lease
    time: float = field(default_factory=time.time)

    @classmethod
    def from_event(cls, event: Mapping[str, Any], client: str, traceback: str = "") -> Failure:
        """Return the failure that an event of a trace tells of, whose traceback may be known elsewhere."""
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
        """The type of the exception, and its place."""
        found = _TYPE.match(self.what)
        place = _place(self.traceback)
        if place is None:  # by its text, without pids, clients and seconds
            place = _NUMBER.sub("#", _first_line(self.what))
        return (found["type"] if found else "", place)

    @property
    def title(self) -> str:
        """What failed, in one line."""
        where = "" if self.round is None else f" in round {self.round}"
        return printable(f"{self.task} of client {self.client} failed{where}")

    @property
    def text(self) -> str:
        """The traceback, or else the error."""
        return shortened(self.traceback or self.what)

    @property
    def what(self) -> str:
        """The error without the client, whom other failures of the kind do not have."""
        return LABEL.sub("", self.error)


class FailureLog:
    """Keeps the failures of a run, and prints the first of each kind. Safe to use from several threads.

    The file is made with the first failure; without a path there is none. ``say`` prints a text that may have
    several lines; by default on stderr.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._say = say or standard_streams.tell
        self._kinds: set[tuple[str, str]] = set()
        self._known: dict[bytes, str] = {}
        self._first: Failure | None = None
        self._lock = threading.Lock()

    def add(self, failure: Failure, *, is_said: bool = True) -> None:
        """Keep a failure; print it if it is the first of its kind, unless that is not wanted."""
        kind = failure.kind
        with self._lock:
            self._first = self._first or failure
            is_new = is_said and kind not in self._kinds and len(self._kinds) < _MOST_PRINTED
            if is_new:
                self._kinds.add(kind)
            self._write(failure)
        if is_new:
            self._say("\n".join([f"{failure.title}:", *_lines(failure.text)]))

    @property
    def pointer(self) -> str:
        """Where the first failure can be read: the end of the sentence that says why a run was ended."""
        if self._first is None:
            return "no reply says why"
        return f"the first {'traceback' if self._first.traceback else 'error'} is above"

    def _write(self, failure: Failure) -> None:
        if self._path is None:
            return
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
        title = f"{at} {failure.title}"
        text = failure.text
        digest = sha256(text.encode(errors="replace")).digest()
        if digest in self._known:  # a round of a thousand clients may have a thousand times the same
            lines = [f"{title}: {_first_line(failure.what)} (the text is that of: {self._known[digest]})"]
        else:
            if len(self._known) < _MOST_KNOWN:
                self._known[digest] = failure.title.replace(" failed", "")
            lines = [f"{title}:", *(_INDENT + line for line in _lines(text))]
        data = "".join(f"{line}\n" for line in [*lines, ""]).encode()
        with suppress(OSError):  # a full disk ends the run where it matters
            # At once, so that what a run that is killed has found out stays.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)


class AllFailed:
    """The rule by which a run is ended: nobody succeeds, so it computes nothing.

    That is so if every reply failed in the first round, or in three rounds in a row in which more than one
    client was asked. Messages of one kind (``"train"``, ``"query"``, ...) of one round are looked at
    together, as soon as the last reply of them is there. An app whose messages say no round has one for
    each set of messages that it sends together. Clients that only fail to evaluate end no run that trains.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._successful: set[str] = set()

    def replied(self, task: str, server_round: int | None, succeeded: int, failed: int) -> str | None:
        """Take the replies to all messages of a kind in a round; return why the run is to be ended, if it is.

        Messages without any reply, because the app waits for no more, have neither ``succeeded`` nor
        ``failed``. The text is such as ``"all 6 clients failed in round 1"``.
        """
        if succeeded:
            self._in_a_row[task] = 0
            self._successful.add(task)
            return None
        if not failed or (task == _EVALUATE and self._successful - {task}):
            return None
        if failed == 1 and not server_round:
            return None  # what comes before the rounds, or an app that asks one client after the other
        is_first = task not in self._in_a_row
        before = self._in_a_row.get(task, 0)
        if is_first or failed > 1:
            self._in_a_row[task] = before + 1
        who = "the one client that was asked" if failed == 1 else f"all {failed} clients"
        where = "the first round" if server_round is None else f"round {server_round}"
        if is_first:
            return f"{who} failed in {where}"
        if failed > 1 and before + 1 >= _ROUNDS_IN_A_ROW:
            where = "three rounds in a row" if server_round is None else f"{where} and the two rounds before"
            return f"{who} failed in {where}"
        return None

    def never_succeeded(self, failed: int) -> str | None:
        """Return why a finished run in which every message failed counts as failed, or None."""
        if self._successful or not failed:
            return None
        return "the only message failed" if failed == 1 else f"all {failed} messages failed"


def outcome_text(outcome: str, failed: int | None, messages: int | None) -> str:
    """Say how a run has ended, as ``"completed, 3 of 60 messages failed"``; counts may be unknown."""
    if not failed or outcome != COMPLETED:
        return outcome
    of = f" of {messages:,}" if messages else ""
    return f"{outcome}, {failed:,}{of} message{'s' * ((messages or failed) != 1)} failed"


def _place(traceback: str) -> str | None:
    """Return file and line of the innermost frame of the app; of any frame where none is the app's."""
    frames = [(found["path"], found["line"]) for found in _FRAME.finditer(traceback)]
    if not frames:
        return None
    own = [
        (path, line)
        for path, line in frames
        if not path.startswith(_PREFIXES) and not any(part in path for part in _LIBRARIES)
    ]
    path, line = (own or frames)[-1]
    return f"{path}:{line}"


def _lines(text: str) -> list[str]:
    return [printable(line.expandtabs(4)) for line in text.splitlines()]


def _first_line(text: str) -> str:
    return printable(shortened(first_line(text)))
