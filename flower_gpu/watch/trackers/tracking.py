"""Has trackers follow a run: one thread for each reads the trace, and sends what is new."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder, write_json
from flower_gpu.errors import ConfigError, shortened
from flower_gpu.options import TRACKERS
from flower_gpu.watch.fields import first_line
from flower_gpu.watch.history import History
from flower_gpu.watch.trackers.points import EVENTS, Points, flat
from flower_gpu.watch.trackers.tracker import FailedMessage, Point, TrackedRun, Tracker, Value

#: Seconds between two looks at the trace.
INTERVAL_S: Final = 0.5
#: Seconds that the end of a run waits for its trackers, all of them together.
PATIENCE_S: Final = 30.0
_CHUNK_BYTES: Final = 256 << 10


def checked(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of trackers, each once.

    Raises ConfigError if one is unknown.
    """
    given = [names] if isinstance(names, str) else list(names or ())
    for name in given:
        if name not in TRACKERS:
            raise ConfigError(f"trackers: {name!r} is not one of {', '.join(TRACKERS)}")
    return tuple(dict.fromkeys(given))


def known(folder: Path) -> tuple[str, ...]:
    """Return the names of the trackers that a run in this folder has had."""
    return tuple(name for name in _ids(RunFolder(folder)) if name in TRACKERS)


def where(folder: Path) -> list[str]:
    """Return a line for each tracker of a run: the address or the command by which to look at it."""
    return [ids["see"] for ids in _ids(RunFolder(folder)).values() if ids.get("see")]


class Tracking:
    """The trackers of one run.

    The constructor imports their libraries, before anything of the run starts.

    ``names``: as :func:`checked` returns them.
    Raises ConfigError if a library is missing, or cannot be used.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._trackers = {name: _made(name) for name in names}

    @property
    def is_on(self) -> bool:
        """Whether there is a tracker."""
        return bool(self._trackers)

    @contextmanager
    def following(
        self,
        folder: Path,
        app: str,
        config: Mapping[str, Any],
        *,
        resumes: bool = False,
        client_of: Callable[[int], str] = str,
    ) -> Iterator[None]:
        """Have the trackers follow the run in a folder, while in the context.

        The run's end has to be in the trace before the context ends. ``client_of`` returns the client of a
        node's id. Nothing is sent, and nothing written, before the first event of the run.
        """
        found = RunFolder(folder)
        before = _ids(found) if resumes else {}
        ids = _IdFile(found, before)
        threads = [
            _TrackerFeed(
                name,
                tracker,
                TrackedRun(found, app, flat({**config, "app": app}), before.get(name, {})),
                ids,
                client_of,
                resumes=resumes,
            )
            for name, tracker in self._trackers.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        except ConfigError:  # the run is refused, and lines that are new in the trace are another process's
            for thread in threads:
                thread.may_start = False
            raise
        finally:
            deadline = time.monotonic() + PATIENCE_S
            for thread in threads:
                thread.end.set()
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    thread.warn(f"it has not taken everything within {PATIENCE_S:g} s after the run")


class _TrackerFeed(threading.Thread):
    """Sends what is new in a trace to one tracker. The trace keeps what the tracker has no time for yet."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        ids: _IdFile,
        client_of: Callable[[int], str],
        *,
        resumes: bool,
    ) -> None:
        super().__init__(name=f"flower-gpu-{name}", daemon=True)
        self.end = threading.Event()
        self.may_start = True
        self._label = name
        self._tracker = tracker
        self._run = run
        self._ids = ids
        self._history = History(keep_finished=False)
        self._points = Points(self._history, client_of)
        self._events = trace.Follower(run.folder.trace)
        self._has_started = False
        self._has_warned = False
        # What the tracker was sent before is counted, and not sent again.
        self._old_bytes = _size(run.folder.trace) if resumes else 0
        self._has_news = False

    def run(self) -> None:
        """Follow the trace until the end; the first error is a warning, and then nothing more is sent."""
        try:
            while self._events.position < self._old_bytes:
                self._read(self._old_bytes - self._events.position)
            while not self.end.wait(INTERVAL_S):
                self._send()
            self._send()
            if self._has_started:
                self._tracker.close(self._history.outcome)
        except Exception as error:
            text = ": ".join(filter(None, (type(error).__name__, first_line(str(error)))))
            self.warn(f"{text}; the run goes on without it")

    def warn(self, text: str) -> None:
        """Print a warning, the first time."""
        if not self._has_warned and sys.stderr is not None:
            self._has_warned = True
            print(
                shortened(f"flower-gpu: warning: tracker {self._label}: {text}"), file=sys.stderr, flush=True
            )

    def _send(self) -> None:
        while True:
            before = self._events.position
            self._pass_on(*self._read(_CHUNK_BYTES))
            if self._events.position - before < _CHUNK_BYTES:
                return

    def _pass_on(self, points: list[Point], failed: list[FailedMessage], described: dict[str, Value]) -> None:
        if not self._has_started:
            if not (self._has_news and self.may_start):
                return
            self._has_started = True
            self._ids.add(self._label, self._tracker.start(self._run))
        if described:
            self._tracker.describe(described)
        if points:
            self._tracker.log(points)
        if failed:
            self._tracker.failed(failed)

    def _read(self, most_bytes: int) -> tuple[list[Point], list[FailedMessage], dict[str, Value]]:
        points: list[Point] = []
        failed: list[FailedMessage] = []
        described: dict[str, Value] = {}
        events = self._events.read_new(most_bytes)
        self._has_news = bool(events)
        unread: list[trace.Event] = []  # each call of feed() takes time with what is open
        for event in events:
            unread.append(event)
            if event.get("event") in EVENTS:
                self._history.feed(unread)
                unread.clear()
                points += self._points.of(event)
                described |= self._points.described(event)
                if (one := self._points.failed(event)) is not None:
                    failed.append(one)
        self._history.feed(unread)
        return points, failed, described


class _IdFile:
    """The file with the ids of trackers, which their threads write."""

    def __init__(self, folder: RunFolder, before: Mapping[str, Mapping[str, str]]) -> None:
        self._path = folder.trackers
        self._ids = dict(before)
        self._lock = threading.Lock()

    def add(self, name: str, ids: Mapping[str, str]) -> None:
        """Keep the ids of one tracker."""
        with self._lock:
            self._ids[name] = dict(ids)
            write_json(self._path, self._ids)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _ids(folder: RunFolder) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(folder.trackers.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _made(name: str) -> Tracker:
    module = importlib.import_module(f"flower_gpu.watch.trackers.{name}")
    classes = {key.lower(): found for key, found in vars(module).items() if isinstance(found, type)}
    try:
        made: Tracker = classes[name]()
    except ImportError as error:
        raise ConfigError(
            f"tracker {name}: a library is not installed ({error}): pip install 'flower-gpu[{name}]'"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # nothing has started yet
        text = first_line(str(error))
        raise ConfigError(f"tracker {name} cannot be used: {type(error).__name__}: {text}") from error
    return made
