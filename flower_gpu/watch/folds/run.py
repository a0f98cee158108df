"""Folds the events of a run's start and end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_gpu.trace import Event
from flower_gpu.watch.fields import mapping, number, text, whole_number
from flower_gpu.watch.folds.limits import KEPT_ENTRIES


class RunFold:
    """Facts about the run itself. They are empty or None until an event reports them."""

    def __init__(self, *, keep_finished: bool) -> None:
        self._keep_finished = keep_finished
        self.kind = self.name = self.host = self.version = ""
        self.settings: Mapping[str, Any] = {}  # settings of the first start
        self.outcome = ""  # also empty for a killed run
        self.error = ""  # reason for a failed run
        self.facts: Mapping[str, Any] = {}  # facts from the engine at the end of the run
        self.pid: int | None = None
        self.clients: int | None = None
        self.cores: int | None = None
        self.started_at: float | None = None
        self.begun_at: float | None = None  # time of the last start, which may have resumed the run
        self.finished_at: float | None = None
        self.first_at: float | None = None  # time of the first event of any kind
        self.last_at: float | None = None
        #: Seconds in which no worker could run, because other processes held the GPUs, cores or memory.
        self.waited_s = 0.0
        self.pauses: list[tuple[float, float]] = []  # begin and end of each interruption of the run
        #: Time at which the run ended before its last start, or None if it was not resumed.
        self.resumed_from: float | None = None
        self._previous_at: float | None = None  # time of the previous event

    @property
    def seconds(self) -> float | None:
        """Seconds since the run was started or last resumed, until its end or its last event."""
        end = self.last_at if self.finished_at is None else self.finished_at
        return None if self.begun_at is None or end is None else max(0.0, end - self.begun_at)

    @property
    def has_one_host(self) -> bool:
        """True unless SuperNodes on several hosts may write to the trace.

        In all other kinds of runs one command runs at a time, on one host.
        """
        return self.kind != "supernodes"

    def over_at(self, since: float, end: float) -> float:
        """Return the time at which a span from ``since`` ended at the latest, if the trace has no end of it.

        An interruption of the run ends all spans. So the result is the first interruption after ``since``, or
        ``end`` if there is none.
        """
        return min((begin for begin, _ in self.pauses if begin >= since), default=end)

    def note_time(self, time: float) -> None:
        """Note the time of any event of the run."""
        self.first_at = time if self.first_at is None else self.first_at
        self._previous_at, self.last_at = self.last_at, max(self.last_at or time, time)

    def fold(self, time: float, event: Event) -> None:
        """Take in an event."""
        match event.get("event"):
            case "run_started":
                self._start(time, event)
            case "run_finished":
                self.finished_at, self.outcome = time, text(event.get("outcome"))
                self.error, self.facts = text(event.get("error")), mapping(event.get("facts"))
            case "run_waited":
                self.waited_s += max(0.0, number(event.get("seconds")) or 0.0)

    def _start(self, time: float, event: Event) -> None:
        self.kind, self.name = text(event.get("kind")), text(event.get("name"))
        # If two hosts write to the same trace, each of them reports a start. The second start does not mean
        # that the run was interrupted and resumed.
        is_resumed = self.finished_at is not None or self.has_one_host
        ended_at = self._previous_at if self.finished_at is None else self.finished_at
        self.resumed_from = None
        if self.started_at is not None and is_resumed and ended_at is not None and ended_at < time:
            self.resumed_from = ended_at
            self.pauses.append((ended_at, time))
            if not self._keep_finished:
                del self.pauses[:-KEPT_ENTRIES]
        # A resumed run reports another start. Keep the time of the first one.
        self.started_at = time if self.started_at is None else self.started_at
        self.begun_at = time
        # Like `seconds`, this covers only the time since the run was last resumed.
        self.waited_s = 0.0
        self.finished_at, self.outcome, self.error, self.facts = None, "", "", {}
        self.host, self.pid = text(event.get("host")), whole_number(event.get("pid"))
        self.version = text(event.get("version"))
        self.settings = self.settings or mapping(event.get("settings"))
        self.clients, self.cores = whole_number(event.get("clients")), whole_number(event.get("cores"))
