"""Reports of a worker during one try of a call, for the trace, the ticket of the lease, and the display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from flower_gpu import trace
from flower_gpu.calls import grants
from flower_gpu.errors import WorkerDiedError, WorkerTimeoutError, text_of
from flower_gpu.leases.lease import Lease
from flower_gpu.leases.tickets import Ticket
from flower_gpu.workers import call_end
from flower_gpu.workers.main_memory import MainMemory

if TYPE_CHECKING:
    from tqdm import tqdm


# Minimum seconds between two reports of progress. They apply to all reports, even at the end of a loop,
# because an app may report each step as the last one.
_TRACE_INTERVAL_S = 0.5
_DRAW_INTERVAL_S = 0.1
_LINE_INTERVAL_S = 10.0
_LAST_LINE_INTERVAL_S = 1.0  # for the line at the end of a loop
_MAX_ENDS: Final = 1000
# Lines for ends of loops that this process has printed for calls of the server
_ends: set[str] = set()


class _Throttle:
    """Passes on at most one report per interval, and keeps the latest report that was held back."""

    def __init__(self, pass_on: Callable[[Mapping[str, Any]], object]) -> None:
        self._pass_on = pass_on
        self._passed_at = float("-inf")
        self._kept: Mapping[str, Any] | None = None

    def offer(self, report: Mapping[str, Any], interval_s: float) -> None:
        """Pass on a report, or keep it if less than ``interval_s`` has passed since the previous one."""
        now = time.monotonic()
        self._kept = report
        if now - self._passed_at >= interval_s:
            self._passed_at = now
            self.flush()

    def restart(self) -> None:
        """Begin a new interval now, in which no report is passed on."""
        self._passed_at = time.monotonic()

    def flush(self) -> None:
        """Pass on the report that was held back, if any."""
        report, self._kept = self._kept, None
        if report is not None:
            self._pass_on(report)


class ProgressDisplay:
    """Shows the progress events of one call.

    ``label``: name of the call, for example ``"fit of client 3"``.
    ``record``: fields of the call in the trace. Its ``pid`` is known once the worker runs.
    ``is_shown``: False if the events go to the trace only.
    ``ends_once``: True if a line for the end of a loop is printed only once per process. The server evaluates
    in each round, and the line of the round already shows this.
    """

    def __init__(
        self, label: str, record: Mapping[str, Any], is_shown: bool = True, *, ends_once: bool = False
    ) -> None:
        self._is_shown = is_shown
        self._ends_once = ends_once
        self._label = label
        self._record = record
        self._bar: tqdm[Any] | None = None
        self._desc: str | None = None
        self._traced = _Throttle(self._trace)
        self._drawn = _Throttle(self._draw)
        self._lines = _Throttle(self._print_between)
        self._last_lines = _Throttle(self._print_end)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._traced.flush()
        # stderr may be closed.
        with suppress(OSError, ValueError):
            self._last_lines.flush()
        self._close()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Handle one event of the worker. Events other than progress are ignored."""
        if event.get("event") != "progress":
            return
        report = {"desc": event.get("desc", ""), "n": event.get("n", 0), "total": event.get("total")}
        self._traced.offer(report, _TRACE_INTERVAL_S)
        if not self._is_shown:
            return
        # The call must not fail if stderr is closed or its reader has ended.
        with suppress(OSError, ValueError):
            self._show(report)

    def _trace(self, report: Mapping[str, Any]) -> None:
        trace.write("progress", **_identity(self._record), **report)

    def _show(self, report: Mapping[str, Any]) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._drawn.offer(report, _DRAW_INTERVAL_S)
        elif report["n"] == 0:
            self._lines.restart()  # a short loop has a line at its end only
        elif report["n"] == report["total"]:
            self._lines.restart()
            self._last_lines.offer(report, _LAST_LINE_INTERVAL_S)
        else:
            self._lines.offer(report, _LINE_INTERVAL_S)

    def _print_between(self, report: Mapping[str, Any]) -> None:
        self._last_lines.flush()  # the end of the previous loop
        self._print(report)

    def _print_end(self, report: Mapping[str, Any]) -> None:
        line = self._line(report)
        if self._ends_once and line in _ends:
            return
        if self._ends_once and len(_ends) < _MAX_ENDS:
            _ends.add(line)
        self._print(report)

    def _print(self, report: Mapping[str, Any]) -> None:
        print(self._line(report), file=sys.stderr, flush=True)

    def _line(self, report: Mapping[str, Any]) -> str:
        of = "" if report["total"] is None else f"/{report['total']}"
        return f"{self._label}: {report['desc']} {report['n']}{of}".rstrip()

    def _draw(self, report: Mapping[str, Any]) -> None:
        desc, done = report["desc"], report["n"]
        if self._bar is None or desc != self._desc or done < self._bar.n:
            # Imported late, because a client without a terminal does not need it.
            from tqdm import tqdm

            self._close()
            self._desc = desc
            self._bar = tqdm(total=report["total"], desc=f"{self._label} {desc}".strip(), leave=False)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None


# Events of a worker's progress through a call, and the names of their times in the trace
_TIMES: Final = MappingProxyType({"task_started": "task_at", "worker_result": "result_at"})
_KEPT: Final = ("gpu_memory", "lacks", "out_of_memory", "no_cuda")


@dataclass
class WorkerReport:
    """The reports of one worker about one call.

    It holds no reference to the arguments of the call, so that they can be freed as early as possible.

    ``record``: fields of the call in the trace. ``pid`` and the start method are added to it.
    ``display``: shows the progress.
    ``ticket``: ticket of the lease, or None.
    ``lease``: lease of the worker, or None.
    ``reports``: True if this object reports the worker's memory, because the worker is on the CPU or
    confined.
    ``clients``: clients of a call for several messages. Each client has its own lines, with its part of the
    time.
    """

    record: dict[str, Any]
    display: ProgressDisplay
    ticket: Ticket | None
    lease: Lease | None
    reports: bool = True
    clients: Sequence[str] = ()
    events: dict[str, dict[str, Any]] = field(default_factory=dict)  # latest event of each kind
    _times: dict[str, Any] = field(
        default_factory=lambda: dict.fromkeys((*_TIMES.values(), "cpu_s", "memory_bytes"))
    )
    _traced: set[str] = field(default_factory=set)  # kinds of events that are in the trace
    _base: MainMemory = field(default_factory=MainMemory)  # main memory of the worker at its start
    _peak: MainMemory = field(default_factory=MainMemory)  # peak of each kind of memory since then
    _used: Mapping[str, int] = field(default_factory=dict)  # GPU memory by UUID, if this object reports it
    _began: float = field(default_factory=time.monotonic)

    @property
    def memory_bytes(self) -> int:
        """Peak growth of the worker's main memory since its start, without pages of mapped files."""
        return int(self._times["memory_bytes"] or 0)

    def on_start(self, pid: int, method: str, *, is_process: bool, is_used_again: bool) -> None:
        """Record that a worker has begun the call."""
        self.record.update(pid=pid, start_method=method)
        if is_used_again:
            self.record["used_again"] = True
        if is_process:
            self._base = self._peak = MainMemory.of_process(pid)
            if self.ticket is not None:
                self.ticket.report_worker(pid, 0)
        for record in self._records():
            trace.write("worker_started", **record)

    def on_look(self, pid: int) -> None:
        """Measure the main memory of the worker, and report it unless the worker does so itself."""
        now = MainMemory.of_process(pid)
        self._peak = MainMemory(*map(max, now, self._peak))
        if self.ticket is not None and self.reports:
            taken_bytes = max(0, now.anonymous_bytes - self._base.anonymous_bytes)
            self.ticket.report_worker(pid, taken_bytes, self._used)

    def _note_peak(self, peak_bytes: int, mapped_bytes: int = 0) -> None:
        """Record the peak of the worker's memory for :attr:`memory_bytes`.

        The kernel reports no peak of anonymous memory. So mapped files are subtracted from the peak of all
        resident memory. The largest growth of mapped files seen at any time is the upper limit of their part.

        ``peak_bytes``: peak growth of all resident memory since the start.
        ``mapped_bytes``: growth of mapped files at the end of the call.
        """
        mapped_bytes = max(mapped_bytes, self._peak.file_bytes - self._base.file_bytes)
        seen_bytes = self._peak.anonymous_bytes - self._base.anonymous_bytes
        self._times["memory_bytes"] = max(0, peak_bytes - mapped_bytes, seen_bytes)

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle one event of the worker."""
        kind = str(event.get("event"))
        if kind in _KEPT:
            self._keep(kind, {key: event[key] for key in event if key != "event"})
        elif kind == "gpu_used" and self.ticket is not None:
            # A confined worker sends this, because it cannot write into the ticket. So do ranks, because the
            # worker that started them does not know their use.
            self.reports = True
            self._used = {**self._used, **used_of_lease(event["used"], self.lease)}
            self.on_look(self.record["pid"])
        elif kind in _TIMES:
            self._times[_TIMES[kind]] = time.time()
            self._times.update({name: event[name] for name in self._times if name in event})
            if event.get("memory_bytes"):
                self._note_peak(event["memory_bytes"], event.get("mapped_bytes") or 0)
            # ``cpu_s`` is None if the task failed.
            if self.clients and event.get("cpu_s") is not None:
                self._times["cpu_s"] = event["cpu_s"] / len(self.clients)
            # Traced only once, because an app may send any number of these events. If the worker stays, the
            # call is over, and the line for its end has the same fields.
            if kind not in self._traced and not event.get("stays"):
                self._traced.add(kind)
                trace.write(kind, **_identity(self.record))
        elif not grants.on_event(event, self.lease, self.record):
            self.display.on_event(event)

    def _keep(self, kind: str, fields: dict[str, Any]) -> None:
        """Keep the fields of an event. Of ranks, each reports its own GPU, and the first error counts."""
        kept = self.events.setdefault(kind, fields)
        if kind == "gpu_memory" and kept is not fields:
            # The worker that started the ranks reports last. Its figures count for GPUs without a rank's.
            known = {gpu["uuid"] for gpu in kept["gpus"]}
            kept["gpus"] = [*kept["gpus"], *(gpu for gpu in fields["gpus"] if gpu["uuid"] not in known)]

    def write_end(self, error: BaseException | None, *, is_cancelled: bool) -> None:
        """Write the end of the call into the trace, if a worker had begun it."""
        if "pid" not in self.record:
            return
        if isinstance(error, WorkerDiedError) and error.peak_bytes:
            self._note_peak(error.peak_bytes - self._base.resident_bytes)
        if "gpu_memory" in self.events:
            self.record["gpus"] = self.events["gpu_memory"]["gpus"]
        seconds = round(time.monotonic() - self._began, 4)
        end = self._end(error, is_cancelled)
        for record in self._records():
            trace.write("worker_finished", **record, **self._times, seconds=seconds, **end)

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of the call in the trace, once per client."""
        yield {**self.record, "client": self.clients[0]} if self.clients else self.record
        # Only the first client has started the worker. To the others it is a used one.
        for number, client in enumerate(self.clients[1:], 2):
            call = f"{self.record['call']}-{number}"
            yield {**self.record, "call": call, "client": client, "used_again": True}

    def _end(self, error: BaseException | None, is_cancelled: bool) -> dict[str, Any]:
        traceback = "" if error is None else call_end.traceback_of(error)
        return {
            "outcome": "cancelled" if error and is_cancelled else self._outcome(error),
            "error": None if error is None else text_of(error),
            **({"traceback": traceback} if traceback else {}),
        }

    def _outcome(self, error: BaseException | None) -> str:
        if error is None:
            return "ok"
        if isinstance(error, WorkerTimeoutError):
            return "timeout"
        if isinstance(error, WorkerDiedError):
            return "died"
        if "out_of_memory" in self.events:
            return "out of memory"
        return "error" if isinstance(error, Exception) else "cancelled"


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that identify the call of an event."""
    return {name: record.get(name) for name in ("call", "pid", "client")}


def used_of_lease(used_bytes: Mapping[str, int], lease: Lease | None) -> dict[str, int]:
    """Return the GPU memory that a worker reports, restricted to the GPUs of its lease and their size."""
    shares = lease.shares if lease is not None else ()
    return {
        share.uuid: min(used_bytes[share.uuid], share.total_bytes)
        for share in shares
        if share.uuid in used_bytes
    }
