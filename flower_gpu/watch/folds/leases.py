"""Folds the events of requests and leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from flower_gpu.trace import Event
from flower_gpu.watch.fields import mappings, number, owner_fields, text, whole_number
from flower_gpu.watch.folds.limits import MOST_OPEN, drop_oldest
from flower_gpu.watch.folds.tally import LeaseCounts, Tally

#: Errors that cancel a request. Its run ends, its message is cancelled, or it gets an idle worker instead.
_CANCELLATIONS: Final = ("WorkerIdlesError", "WorkerDiedError", "KeyboardInterrupt")


@dataclass
class LeaseSpan:
    """A request and the resulting lease. If a worker runs several calls, the first call made the request.

    A time is None if its event did not happen or is missing from the trace. ``memory_bytes`` is the GPU
    memory by UUID. It is empty if the request is for cores and main memory alone.
    """

    call: str
    client: str
    task: str
    round: int | None
    requested_at: float | None = None
    caller_pid: int | None = None
    granted_at: float | None = None
    refused_at: float | None = None  # end of a wait without a lease
    is_given_up: bool = False  # True if the caller cancelled the request
    released_at: float | None = None
    id: str = ""
    waited_s: float = 0.0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    is_used: bool = False  # True once a worker has finished a call with the lease
    cores: float | None = None  # leased or requested cores, or None if not counted
    host_memory_bytes: int | None = None  # the same for main memory
    host: str = ""  # host in a Ray cluster; empty for the machine of the run itself
    is_lost: bool = False  # True if the lease ended because its host was lost
    #: Start time and client of each later call of the same worker. Without finished items, only the last.
    turns: list[tuple[float, str]] = field(default_factory=list)

    def grant(self, time: float, event: Event) -> None:
        """Turn the request into a lease."""
        self.granted_at, self.id = time, text(event.get("lease"))
        self.cores = number(event.get("cores"))
        self.host_memory_bytes = whole_number(event.get("host_memory_bytes"))
        self.waited_s = max(0.0, number(event.get("waited_s")) or 0.0)
        for gpu in mappings(event.get("gpus")):
            self.memory_bytes[text(gpu.get("uuid"))] = whole_number(gpu.get("memory_bytes")) or 0


class LeaseFold:
    """Requests and leases, for GPUs or for cores and main memory alone.

    The events ``cores_...`` are about calls on the CPU, and have the same fields as the events ``lease_...``.
    """

    def __init__(self, tally: Tally, *, keep_finished: bool) -> None:
        self._tally = tally
        self._keep_finished = keep_finished
        self._all: list[LeaseSpan] = []  # in the order of their start; empty without finished items
        self._waiting: dict[str, LeaseSpan] = {}  # requests without a lease, by call
        self._granted: dict[str, LeaseSpan] = {}  # leases by id

    @property
    def spans(self) -> list[LeaseSpan]:
        """Requests and leases, the unfinished ones only unless the history keeps finished items."""
        return self._all if self._keep_finished else [*self._waiting.values(), *self._granted.values()]

    @property
    def waiting(self) -> list[LeaseSpan]:
        """Requests without a lease so far, oldest first."""
        return list(self._waiting.values())

    def by_id(self, lease: str) -> LeaseSpan | None:
        """Return a lease by its id, or None."""
        return self._granted.get(lease)

    def add_turn(self, span: LeaseSpan, time: float, client: str) -> None:
        """Note that a worker has begun another call with its lease."""
        span.turns.append((time, client))
        if not self._keep_finished:
            del span.turns[:-1]

    def fold(self, time: float, event: Event) -> None:
        """Take in an event."""
        match event.get("event"):
            case "lease_requested" | "cores_requested":
                span = self._new(event)
                span.requested_at, span.caller_pid = time, whole_number(event.get("caller_pid"))
                self._waiting[span.call] = span
                if not self._keep_finished:
                    drop_oldest(self._waiting, MOST_OPEN)
            case "lease_granted" | "cores_granted":
                # The line with the request may be missing from the trace.
                request = self._waiting.pop(text(event.get("call")), None)
                span = self._new(event) if request is None else request
                span.grant(time, event)
                self._granted[span.id] = span
                self._counts(event).grant(span.waited_s)
                if not self._keep_finished:
                    drop_oldest(self._granted, MOST_OPEN)
            case "lease_not_granted" | "cores_not_granted":
                request = self._waiting.pop(text(event.get("call")), None)
                if request is not None:
                    request.refused_at = time
                    request.is_given_up = text(event.get("reason")) in _CANCELLATIONS
                self._counts(event).refused += 1
            case "lease_released" | "cores_released":
                if (lease := self.by_id(text(event.get("lease")))) is not None:
                    self._release(time, lease)
            case "host_lost":
                self._lose_host(time, text(event.get("host")))
            case "run_started" if not self._keep_finished:
                # Leases that the previous process left open ended with it.
                self._waiting, self._granted = {}, {}

    def _lose_host(self, time: float, host: str) -> None:
        """End the requests and leases of a lost host, which writes no further events."""
        if not host:
            return
        for request in self.waiting:
            if request.host == host:
                del self._waiting[request.call]
                request.refused_at, request.is_lost = time, True
        for lease in list(self._granted.values()):
            if lease.host == host and lease.released_at is None:
                lease.is_lost = True
                self._release(time, lease)

    def _release(self, time: float, lease: LeaseSpan) -> None:
        lease.released_at = time
        if not self._keep_finished:
            del self._granted[lease.id]

    def _new(self, event: Event) -> LeaseSpan:
        span = LeaseSpan(**owner_fields(event))
        if self._keep_finished:
            self._all.append(span)
        return span

    def _counts(self, event: Event) -> LeaseCounts:
        return self._tally.cores if text(event.get("event")).startswith("cores_") else self._tally.leases
