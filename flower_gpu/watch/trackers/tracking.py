"""Threads that send the figures of a running run to its trackers.

The problem: a tracker may be slow or out of reach for minutes, and a round must never wait for it. Points
must not be lost either, and memory use should stay small while a tracker is away.

The trace solves this, because it is a queue on disk. Each tracker has a :class:`_TrackerFeed`, a daemon
thread that reads the trace at its own pace. It feeds its own :class:`History`, and passes the resulting
points to :meth:`Tracker.log`. The threads share no state with each other or with the run. All methods of a
tracker are called from its thread, except for the constructor, which imports the library before the run
starts.

The thread of the run uses :class:`Tracking`. :meth:`Tracking.following` starts the threads. At the end of the
run it sets ``end`` of each thread and joins all of them, ``PATIENCE_S`` seconds in total. A thread that is
still alive then is abandoned with a warning. It is a daemon, so the process can exit.

Details that are easy to break:

- The tracker's run begins with the first round, or with the end of the run, because the strategy is known
  only then. Before that, nothing is sent or written.
- A resumed run appends to the trace of the earlier run. The feed reads the old part to rebuild the history
  and to number the points, and discards these points. The tracker received them in the earlier run.
- If the run is refused with a ConfigError, another process may be using the same trace. ``may_start`` is then
  set to False before ``end``, so no tracker starts a run for events of the other process.
- After an exception, the feed cannot know if the tracker is out of reach or refuses one point.
  :meth:`_TrackerFeed._pass_over` finds out by delivering single points.
"""

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
    Point,
    Points,
    TrackedRun,
    Tracker,
    flat,
)

#: Seconds between two reads of the trace.
INTERVAL_S: Final = 0.5
#: Seconds that the end of a run waits for all its trackers together.
PATIENCE_S: Final = 30.0
#: First and longest pause between two attempts while a tracker fails, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: Pauses between the attempts at the end of the run, in seconds.
_LAST_PAUSES_S: Final = (1.0, 2.0)
#: Number of points to try before a tracker counts as out of reach.
_PROBES: Final = 3
_CHUNK_BYTES: Final = 256 << 10
#: Events that start a tracker's run.
_BEGIN: Final = ("round_started", "round_finished", "round", "run_finished")


def checked(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of trackers without duplicates.

    Raises ConfigError for an unknown name.
    """
    requested = [names] if isinstance(names, str) else list(names or ())
    for name in requested:
        if name not in TRACKERS:
            raise ConfigError(f"trackers: {name!r} is not one of {', '.join(TRACKERS)}")
    return tuple(dict.fromkeys(requested))


def known(folder: Path) -> tuple[str, ...]:
    """Return the names of the trackers that the run in this folder has used so far."""
    return tuple(name for name in _ids(folder) if name in TRACKERS)


def locations(folder: Path) -> list[str]:
    """Return the address or command to view the run in each of its trackers, one line per tracker."""
    return [ids["see"] for ids in _ids(folder).values() if ids.get("see")]


class Tracking:
    """The trackers of one run.

    The constructor imports their libraries, so it must be called before any part of the run starts.

    ``names``: names of trackers from :func:`checked`.
    Raises ConfigError if a library is missing or cannot be used.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._trackers = {name: _made(name) for name in names}

    @property
    def is_on(self) -> bool:
        """True if the run has a tracker."""
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
        """Send the figures of the run in a folder to the trackers while in the context.

        The run must write its end into the trace before the context ends. Leaving the context blocks for up
        to ``PATIENCE_S`` seconds. Nothing is sent or written before the first round of the run.

        ``client_of``: function that returns the client for a node id.
        """
        run_folder = RunFolder(folder)
        ids_by_tracker = _ids(folder) if resumes else {}
        config = flat({**config, "app": app})
        threads = [
            _TrackerFeed(
                name,
                tracker,
                TrackedRun(run_folder, app, config, ids_by_tracker.get(name, {})),
                Points(History(keep_finished=False), client_of),
                resumes=resumes,
            )
            for name, tracker in self._trackers.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        except ConfigError:
            # The run was refused. New lines in the trace come from another process.
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
                    thread.warn(
                        "end", f"it has not accepted everything within {PATIENCE_S:g} s after the run"
                    )


class _TrackerFeed(threading.Thread):
    """A thread that sends new points of a trace to one tracker. See the top of this module."""

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
        # Points of the earlier run are counted, but not sent again.
        self._old_bytes = self._events.size if resumes else 0
        self._waiting: deque[Point] = deque()
        self._left_out = 0
        self._pause_s = 0.0  # seconds until the next attempt; 0 while the tracker is within reach
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
            self.warn("down", f"{_text(error)}; whatever it has not accepted is sent again later")
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._retry_at = time.monotonic() + self._pause_s
            return False
        self._said.discard("down")
        self._pause_s = 0.0
        return True

    def _finish(self) -> None:
        """Send the last points in a few attempts, and close the tracker's run."""
        for pause_s in (*_LAST_PAUSES_S, None):
            if self._try_to_send() or pause_s is None:
                break
            time.sleep(pause_s)
        if not self._has_started:
            if self._has_begun and self.may_start:
                self.warn("end", "it has nothing of this run")
            return
        if remaining := len(self._waiting) + self._left_out:
            self.warn("end", f"{remaining} point{'s are' if remaining != 1 else ' is'} missing there")
        self._tracker.close(self._points.history.run.outcome)

    def warn(self, topic: str, why: str) -> None:
        """Print a warning, unless there was already a warning about the same topic."""
        if topic not in self._said:
            self._said.add(topic)
            standard_streams.tell(shortened(f"flower-gpu: warning: tracker {self._label}: {why}"))

    def _send(self) -> None:
        is_all_read = False
        while not is_all_read:
            previous = self._events.position
            self._read(_CHUNK_BYTES)
            is_all_read = self._events.position - previous < _CHUNK_BYTES
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
        facts = (
            {"strategy": history.rounds.strategy, "num_rounds": history.rounds.num_rounds}
            if history.rounds.strategy
            else {}
        )
        ids = self._tracker.start(replace(run, config={**run.config, **facts}))
        trace.write_to(run.folder.path, "tracker_started", tracker=self._label, ids=dict(ids))

    def _read(self, max_bytes: int) -> None:
        for event in self._events.read_new(max_bytes):
            self._has_begun |= event.get("event") in _BEGIN
            self._points.history.feed([event])
            self._waiting.extend(self._points.of(event))


def _text(error: Exception) -> str:
    return ": ".join(filter(None, (type(error).__name__, first_line(str(error)))))


def _ids(folder: Path) -> dict[str, dict[str, str]]:
    """Return the ids of a run in its trackers, by name of the tracker, for a resumed run to continue."""
    events = trace.read(RunFolder(folder).trace, only="tracker_started")
    return {
        text(event.get("tracker")): {name: text(id_) for name, id_ in mapping(event.get("ids")).items()}
        for event in events
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
    except Exception as error:
        # A library may raise any exception. No part of the run has started yet, so refuse the run.
        text = first_line(str(error))
        raise ConfigError(f"tracker {name} cannot be used: {type(error).__name__}: {text}") from error
