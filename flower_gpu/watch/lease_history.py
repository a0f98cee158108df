"""The leases of one kind that a run has asked for, as far as its events tell."""

from __future__ import annotations

from typing import Final

from flower_gpu.trace import Event
from flower_gpu.watch.fields import number, text, whole, whose
from flower_gpu.watch.spans import LeaseSpan, drop_oldest

#: Errors by which a request is given up: its run ends, its message is cancelled, or it takes an idle worker.
_GIVEN_UP: Final = ("WorkerIdlesError", "WorkerDiedError", "KeyboardInterrupt")


class LeaseHistory:
    """Leases on GPUs, or leases on cores and main memory alone. A request becomes a lease or is refused."""

    def __init__(self) -> None:
        self.spans: list[LeaseSpan] = []  # requests and leases, in the order of their starts
        self.waiting: dict[str, LeaseSpan] = {}  # requests without a lease, by call
        self.granted: dict[str, LeaseSpan] = {}  # leases, by id

    def request(self, time: float, event: Event) -> None:
        """Begin a request."""
        span = LeaseSpan(**whose(event), requested_at=time, caller_pid=whole(event.get("caller_pid")))
        self.waiting[span.call] = span
        self.spans.append(span)

    def grant(self, time: float, event: Event) -> LeaseSpan:
        """Make a request a lease, and return it. The trace may lack the request."""
        span = self.waiting.pop(text(event.get("call")), None)
        if span is None:
            span = LeaseSpan(**whose(event), requested_at=None)
            self.spans.append(span)
        span.granted_at, span.id = time, text(event.get("lease"))
        span.cores, span.host_memory_bytes = number(event.get("cores")), whole(event.get("host_memory_bytes"))
        span.waited_s = max(0.0, number(event.get("waited_s")) or 0.0)
        self.granted[span.id] = span
        return span

    def refuse(self, time: float, event: Event) -> None:
        """End a request without a lease."""
        if (span := self.waiting.pop(text(event.get("call")), None)) is not None:
            span.refused_at = time
            span.is_given_up = text(event.get("reason")) in _GIVEN_UP

    def release(self, time: float, event: Event) -> None:
        """End a lease."""
        if (span := self.granted.get(text(event.get("lease")))) is not None:
            span.released_at = time

    def lose_host(self, time: float, host: str) -> None:
        """End the requests and leases of a lost host."""
        for request in list(self.waiting.values()):
            if request.host == host:
                del self.waiting[request.call]
                request.refused_at, request.is_lost = time, True
        for lease in self.granted.values():
            if lease.host == host and lease.released_at is None:
                lease.released_at, lease.is_lost = time, True

    def forget_finished(self, most: int) -> None:
        """Keep only what goes on: the newest requests and the newest leases, at most so many of each."""
        drop_oldest(self.waiting, most)
        drop_oldest(self.granted, most)
        self.granted = {id_: span for id_, span in self.granted.items() if span.released_at is None}
        self.spans = [*self.waiting.values(), *self.granted.values()]
