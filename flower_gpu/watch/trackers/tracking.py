"""Has trackers follow a run: one thread for each reads the trace, and sends what is new."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flower_gpu import standard_streams, trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError, shortened
from flower_gpu.options import TRACKERS
from flower_gpu.watch.fields import first_line, mapping, text
from flower_gpu.watch.history import History
from flower_gpu.watch.trackers import adapters
from flower_gpu.watch.trackers.points import (
    EVENTS,
    Point,
    Points,
    TrackedRun,
    Tracker,
    flat,
)

#: Seconds between two looks at the trace.
INTERVAL_S: Final = 0.5
#: Seconds that the end of a run waits for its trackers, all of them together.
PATIENCE_S: Final = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two tries, while a tracker fails
_LAST_PAUSES_S: Final = (1.0, 2.0)  # between the tries at the end of the run
_PROBES: Final = 3  # points to try before a tracker counts as out of reach
_CHUNK_BYTES: Final = 256 << 10
#: Events with which a tracker's run begins.
_BEGIN: Final = ("round_started", "round_finished", "round", "run_finished")


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
    return tuple(name for name in _ids(folder) if name in TRACKERS)


def where(folder: Path) -> list[str]:
    """Return a line for each tracker of a run: the address or the command by which to look at it."""
    return [ids["see"] for ids in _ids(folder).values() if ids.get("see")]


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
        node's id. Nothing is sent, and nothing written, before the first round of the run.
        """
        run_folder = RunFolder(folder)
        before = _ids(folder) if resumes else {}
        config = flat({**config, "app": app})
        threads = [
            _TrackerFeed(
                name,
                tracker,
                TrackedRun(run_folder, app, config, before.get(name, {})),
                Points(History(keep_finished=False), client_of),
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
                    thread.warn("end", f"it has not taken everything within {PATIENCE_S:g} s after the run")


class _TrackerFeed(threading.Thread):
    """Sends what is new in a trace to one tracker. The trace keeps what the tracker has no time for yet.

    The tracker's run begins once there are rounds, or the end: by then the strategy is known.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        points: Points,
        *,
        resumes: bool,
    ) -> None:
        super().__init__(name=f"flower-gpu-{name}", daemon=True)
        self.end = threading.Event()
        self.may_start = True
        self._label = name
        self._tracker = tracker
        self._run = run
        self._points = points
        self._events = trace.Follower(run.folder.trace)
        self._has_begun = self._has_started = False
        # What the tracker was sent before is counted, and not sent again.
        self._old_bytes = self._events.size if resumes else 0
        self._waiting: deque[Point] = deque()
        self._left_out = 0
        self._pause_s = 0.0  # 0: the tracker is within reach
        self._retry_at = 0.0
        self._said: set[str] = set()

    def run(self) -> None:
        """Follow the trace until the end of the run."""
        try:
            while self._events.position < self._old_bytes:
                self._read(self._old_bytes - self._events.position)
            self._waiting.clear()
            self._has_begun = False
            while not self.end.wait(INTERVAL_S):
                if time.monotonic() >= self._retry_at:
                    self._try_to_send()
            self._finish()
        except Exception as error:
            self.warn("end", f"{_text(error)}; its copy of the run is not complete")

    def _try_to_send(self) -> bool:
        """Send new points. Return False after an error, which delays the next try."""
        try:
            self._send()
        except Exception as error:
            self.warn("down", f"{_text(error)}; what it has not taken is sent again later")
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._retry_at = time.monotonic() + self._pause_s
            return False
        self._said.discard("down")
        self._pause_s = 0.0
        return True

    def _finish(self) -> None:
        """Send the last points, in a few tries, and close the tracker's run."""
        for pause_s in (*_LAST_PAUSES_S, None):
            if self._try_to_send() or pause_s is None:
                break
            time.sleep(pause_s)
        if not self._has_started:
            if self._has_begun and self.may_start:
                self.warn("end", "it has nothing of this run")
            return
        if left := len(self._waiting) + self._left_out:
            self.warn("end", f"{left} point{'s are' if left != 1 else ' is'} missing there")
        self._tracker.close(self._points.history.outcome)

    def warn(self, about: str, why: str) -> None:
        """Print a warning, unless there was one about the same before."""
        if about not in self._said:
            self._said.add(about)
            standard_streams.tell(shortened(f"flower-gpu: warning: tracker {self._label}: {why}"))

    def _send(self) -> None:
        is_all_read = False
        while not is_all_read:
            before = self._events.position
            self._read(_CHUNK_BYTES)
            is_all_read = self._events.position - before < _CHUNK_BYTES
            if not (self._has_begun and self.may_start):
                continue
            if not self._has_started:
                self._start()
                self._has_started = True
            self._deliver()

    def _deliver(self) -> None:
        """Deliver the waiting points. Raises the tracker's exception if it is out of reach."""
        while self._waiting:
            try:
                self._tracker.log(self._waiting)
            except Exception as error:
                self._pass_over(error)

    def _pass_over(self, error: Exception) -> None:
        """Deliver one point, and drop the refused points before it.

        After an error, the tracker either refuses a point or is out of reach. If it accepts one of the first
        points, or the last point, it is within reach. Then a point that it refuses twice is dropped.
        Otherwise ``error`` is raised, and all points are kept.
        """
        probes = list(islice(self._waiting, _PROBES))
        if len(self._waiting) > _PROBES:
            probes.append(self._waiting[-1])
        for number, probe in enumerate(probes):
            if self._error_of(probe) is None:
                for point in probes[:number]:
                    if (refusal := self._error_of(point)) is not None:
                        self._left_out += 1
                        self.warn("point", f"{_text(refusal)}; that point is left out")
                for point in probes[: number + 1]:
                    self._waiting.remove(point)
                return
        raise error

    def _error_of(self, point: Point) -> Exception | None:
        """Deliver one point. Return the tracker's exception, or None after success."""
        try:
            self._tracker.log(deque([point]))
        except Exception as error:
            return error
        return None

    def _start(self) -> None:
        history, run = self._points.history, self._run
        told = {"strategy": history.strategy, "num_rounds": history.num_rounds} if history.strategy else {}
        ids = self._tracker.start(replace(run, config={**run.config, **told}))
        trace.write_to(run.folder.path, "tracker_started", tracker=self._label, ids=dict(ids))

    def _read(self, most_bytes: int) -> None:
        unread: list[trace.Event] = []  # each call of feed() takes time with what is open
        for event in self._events.read_new(most_bytes):
            unread.append(event)
            self._has_begun |= event.get("event") in _BEGIN
            if event.get("event") in EVENTS:
                self._points.history.feed(unread)
                unread.clear()
                self._waiting.extend(self._points.of(event))
        self._points.history.feed(unread)


def _text(error: Exception) -> str:
    return ": ".join(filter(None, (type(error).__name__, first_line(str(error)))))


def _ids(folder: Path) -> dict[str, dict[str, str]]:
    """Return the ids of a run in its trackers, by their names: a resumed run goes on with them."""
    told = trace.read(RunFolder(folder).trace, only="tracker_started")
    return {
        text(one.get("tracker")): {name: text(id_) for name, id_ in mapping(one.get("ids")).items()}
        for one in told
    }


def _made(name: str) -> Tracker:
    try:
        return adapters.ALL[name]()
    except ImportError as error:
        raise ConfigError(
            f"tracker {name}: a library is not installed ({error}): pip install 'flower-gpu[{name}]'"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # nothing has started yet
        text = first_line(str(error))
        raise ConfigError(f"tracker {name} cannot be used: {type(error).__name__}: {text}") from error
