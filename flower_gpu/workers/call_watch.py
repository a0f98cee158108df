"""The facts about one call, as its caller sees them while a worker runs the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.workers.call import Call
from flower_gpu.workers.events import Sink, note_imported
from flower_gpu.workers.output import Tail

# Seconds from the result to the exit, in which atexit functions and CUDA's own cleanup run.
EXIT_GRACE_S = 10.0
# How much of EXIT_GRACE_S the next call waits. A worker with a lease gets all of it.
WAIT_FOR_EXIT_S = 1.0
# Seconds between looks at the worker's memory at first.
FIRST_LOOKS_S = 0.05


@dataclass
class CallWatch:
    """The facts about one call, filled in while the worker runs it."""

    call: Call
    pid: int
    on_event: Sink | None
    #: True once the worker has read the call. A new worker counts as having read it.
    is_begun: bool
    tail: Tail = field(default_factory=Tail)
    has_result: bool = False
    #: True if the worker waits for another call.
    stays: bool = False
    #: True once the worker has exited.
    has_ended: bool = False
    #: Exit code, ``-n`` after signal ``n``, None if unknown.
    exitcode: int | None = None
    #: Reason for an unknown exit code.
    why_unknown: str = ""
    #: True if a stop order arrived before the result.
    is_stopped: bool = False
    #: True if another thread killed the worker, and the worker had not exited after KILLED_S.
    is_cancelled: bool = False
    #: Kernel function that the worker sleeps in if SIGKILL has not ended it within KILLED_S; otherwise empty.
    stuck_in: str = ""
    #: Variables that the task's module set after the fork server's libraries had read them.
    set_too_late: dict[str, str | None] | None = None
    #: True if the kernel certainly killed the worker because main memory ran out.
    is_out_of_memory: bool = False
    #: Callback for looks at the worker's memory, called at intervals with its process id.
    on_look: Callable[[int], None] | None = None
    #: Time of the next look, in seconds since the watch began.
    look_at_s: float = FIRST_LOOKS_S
    #: Place in the task that called sys.exit.
    sys_exit: str = ""
    #: Lower bound of the seconds that the call has spent on imports.
    import_s: float = 0.0
    #: Modules that the worker has imported, if it reported new ones during the call.
    imported: list[str] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def hangs(self) -> bool:
        """Return True if the worker is still running the call, so that it has to be killed."""
        return not self.has_ended and not self.has_result

    @property
    def exit_s(self) -> float:
        """Return the seconds to wait for the worker's exit after the result."""
        may_be_late = self.call.lease_descriptor < 0 and self.call.confinement is None
        return min(EXIT_GRACE_S, WAIT_FOR_EXIT_S) if may_be_late else EXIT_GRACE_S

    @property
    def is_late_to_exit(self) -> bool:
        """Return True if the result is there, but the worker has not exited within ``exit_s``."""
        return self.has_result and not self.has_ended and self.exit_s < EXIT_GRACE_S

    def take(self, event: dict[str, Any]) -> None:
        """Record a report of the worker, and pass it on to ``on_event`` if the caller wants it."""
        kind = event.get("event")
        if kind == "result":
            self.has_result, self.stays = True, bool(event.get("stays"))
            self.peak_bytes = event.get("peak_bytes") or 0
            if self.on_event is not None:
                self.on_event({**event, "event": "worker_result"})
        elif kind == "begun":
            self.is_begun = True
        elif kind == "importing":
            self.import_s = float(event["seconds"])
        elif kind == "sys_exit":
            self.sys_exit = str(event["where"])
        elif kind == "imported":
            self.imported = event["names"]
            note_imported(self.imported)
        elif kind == "set_too_late":
            self.set_too_late = event["variables"]
        elif self.on_event is not None:
            self.on_event(event)
