"""How a message to a virtual node is handled: in a worker with a lease, while the host has memory for it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Final

from flwr.app import Context
from flwr.common.logger import log

from flower_gpu import frameworks, trace
from flower_gpu.calls.settings import CallSettings, call_settings
from flower_gpu.errors import (
    FlowerGPUError,
    GPUError,
    GPUOutOfMemoryError,
    LeaseTimeoutError,
    NotDeterministicError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from flower_gpu.flower import message_call, record_bytes
from flower_gpu.flower.records import round_of
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.options import CALL, joined
from flower_gpu.simulation.batch_size import Batches
from flower_gpu.simulation.clients import Own, as_written, resources
from flower_gpu.simulation.host import Answer, Visit, Work, failed
from flower_gpu.simulation.host_memory import HostMemory
from flower_gpu.simulation.in_worker import handle, handle_deterministically
from flower_gpu.simulation.slots import Slot
from flower_gpu.simulation.verifying import Differences, Handled, Verifier, differences
from flower_gpu.simulation.worker_starts import WorkerStarts

# What another run would not have: no client's own error.
_ACCIDENTS: Final = (WorkerDiedError, WorkerStartError, WorkerTimeoutError, GPUError)
# Of these, what another try may not have either.
_TRIED_AGAIN: Final = (WorkerDiedError, WorkerStartError)
_TRIES: Final = 3  # of a message in a deterministic run
_MOST_GIVEN_UP: Final = 1000  # messages that are remembered: they may come later


class MessageHandler:
    """Handles assignments of one run: one message, or several that the app handles at once.

    Each thread has one assignment at a time, and may keep its worker for the next one.

    ``work``: the run's.
    ``options``: of each call, as for :class:`flower_gpu.CallOptions`.
    ``new_slot``: makes what runs the calls of one thread.
    ``workers``: number of assignments that are handled at the same time.
    ``tries``: how often a message is handled, at most, whose worker dies; three times in a deterministic run.
    ``inventory``: the GPUs of this host, if messages need not look at them.
    """

    def __init__(
        self,
        work: Work,
        options: Mapping[str, Any],
        new_slot: Callable[[], Slot],
        *,
        workers: int = 1,
        tries: int = 1,
        inventory: Inventory | None = None,
    ) -> None:
        self._work = work
        self._task = handle_deterministically if work.is_deterministic else handle
        self._tries = _TRIES if work.is_deterministic else tries
        self._nodes = work.nodes
        self._options = dict(options)
        self._inventory = inventory
        self._new_slot = new_slot
        self._here = threading.local()
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._others_started = 0  # workers that were in none of these slots
        #: Chooses how many messages are in one assignment.
        self.batches = Batches(workers)
        self._has_used = False  # whether a worker has handled a second message
        self._running: dict[str, Slot] = {}
        self._given_up: deque[str] = deque(maxlen=_MOST_GIVEN_UP)
        self._is_over = False
        self._worked_at = 0.0  # when a message was done last
        self._verifier = Verifier() if work.verify_recycling else None
        self._memory = HostMemory()
        self._starts = WorkerStarts(has_preload=bool(self._options.get("preload")))
        self._differ: dict[str, bool] = {}  # whether clients do, by message type
        self._resolved: dict[int, CallSettings] = {}  # by what a client has of its own

    @staticmethod
    def may_share(visit: Visit, other: Visit) -> bool:
        """Return True if two messages can be in one assignment: they are of one type and round."""
        one, two = visit.message, other.message
        return one.metadata.message_type == two.metadata.message_type and round_of(one) == round_of(two)

    def __call__(self, *visits: Visit) -> list[Answer]:
        """Have one worker handle the messages of an assignment.

        An exception is in the answer, in the place of the reply.
        """
        began = time.monotonic()
        slot = self._slot()
        with self._lock:
            is_over = self._is_over
            begun = [each for each in visits if not (is_over or each.message_id in self._given_up)]
            if begun:
                slot.begin()
            self._running.update((each.message_id, slot) for each in begun)
        outcomes: Sequence[Handled | BaseException] = []
        error: BaseException | None = None
        try:
            outcomes = self._handle(begun, slot) if begun else []
        except BaseException as caught:  # a SystemExit is the client's, not this thread's
            error = caught
            contexts = [self._context_of(visit) for visit in begun]
            outcomes = message_call.errors_of_each(error, begun[0].message.metadata.message_type, contexts)
        with self._lock:
            outcome_by_id = {
                visit.message_id: outcome
                for visit, outcome in zip(begun, outcomes, strict=True)
                if self._running.pop(visit.message_id, None)  # else it was given up, maybe when it was done
            }
            self._worked_at = time.monotonic()
            smaller = self._smaller(error, begun)
        if smaller:
            parts = [visits[start : start + smaller] for start in range(0, len(visits), smaller)]
            return [answer for part in parts for answer in self(*part)]
        self.batches.count(len(begun))
        seconds = (time.monotonic() - began) / len(visits)
        return [self._answer(visit, outcome_by_id.get(visit.message_id), seconds) for visit in visits]

    def _answer(self, visit: Visit, outcome: Handled | BaseException | None, seconds: float) -> Answer:
        """Return the answer to a message; None: it was given up."""
        if isinstance(outcome, Handled):
            state = record_bytes.encode(outcome.context.state) if outcome.context.state else b""
            return Answer(visit.message_id, outcome.reply, state, seconds, outcome.call_s)
        if outcome is None:
            outcome = WorkerStartError("the run is over") if self._is_over else self._no_reply(visit)
        elif self._work.is_strict and isinstance(outcome, FlowerGPUError):
            outcome = _end_of_run(outcome)
        return Answer(visit.message_id, failed(visit.message, outcome), seconds=seconds)

    def _smaller(self, error: BaseException | None, visits: Sequence[Visit]) -> int:
        """Return the size of the smaller assignments in which failed messages are handled again; 0 if not."""
        is_killed = isinstance(error, WorkerDiedError) and error.is_out_of_memory
        if len(visits) > 1 and (is_killed or isinstance(error, GPUOutOfMemoryError)):
            size = self.batches.refuse(visits[0].message.metadata.message_type, len(visits))
            log(
                WARNING,
                "%d messages at once are too many: %s. They are handled again, %d at once",
                len(visits),
                str(error).partition("\n")[0].rstrip("."),
                size,
            )
            return size
        if len(visits) > 1 and self._tries > 1 and isinstance(error, _TRIED_AGAIN):
            return 1  # any of them may have ended the worker
        return 0

    def _handle(self, visits: Sequence[Visit], slot: Slot) -> list[Handled]:
        """Have messages handled: once, unless used workers are to be verified."""
        slot.go_on(self._work.calls_per_worker // len(visits))
        if len(visits) > 1:
            return self._run_once(visits, slot)
        if self._verifier is None or not slot.may_use_again:
            return [self._run(visits[0], slot)]
        return [self._verified(visits[0], slot, self._verifier)]

    def _verified(self, visit: Visit, slot: Slot, verifier: Verifier) -> Handled:
        """Have a message handled by a used worker and by a new one, and compare the results."""
        used = self._handled_more(visit, slot)
        was_used = slot.is_used_again
        if slot.has_lease:
            slot.retire()  # its room may be all that there is
        new = self._in_new_worker(visit, lambda other: self._run(visit, other))
        if was_used:
            found = differences(new, used)
            noise: Differences = {}
            if found:
                again = self._in_new_worker(visit, lambda other: self._handled_more(visit, other))
                noise = differences(new, again)
            client = message_call.client_of(new.context)
            verifier.compared(visit.message.metadata.message_type, client, found, noise)
        return new

    def _handled_more(self, visit: Visit, slot: Slot) -> Handled:
        """Have a message handled once more than it was sent: nothing is kept of it, and nothing traced."""
        try:
            with trace.muted():
                return self._run(visit, slot)
        except FlowerGPUError as error:
            return Handled(self._context_of(visit), error=error)

    def _in_new_worker(self, visit: Visit, run: Callable[[Slot], Handled]) -> Handled:
        """Run something in a slot of its own, which ends with it."""
        slot = self._new_slot()
        with self._lock:
            if visit.message_id not in self._running:
                raise self._no_reply(visit)
            slot.begin()
            self._running[visit.message_id] = slot
        try:
            return run(slot)
        finally:
            slot.close()
            with self._lock:
                self._others_started += slot.workers_started

    def _run(self, visit: Visit, slot: Slot) -> Handled:
        """Have a message handled; where its worker dies, a few times."""
        for left in reversed(range(self._tries)):
            try:
                return self._run_once([visit], slot)[0]
            except _TRIED_AGAIN as error:
                with self._lock:
                    is_wanted = visit.message_id in self._running
                if not left or not is_wanted:
                    raise
                first = str(error).partition("\n")[0].rstrip(".")
                log(WARNING, "%s. A new worker handles the message again", first)
        raise AssertionError

    def _run_once(self, visits: Sequence[Visit], slot: Slot) -> list[Handled]:
        """Have messages handled, a single one a second time, alone, if it ran out of main memory."""
        try:
            return self._run_in_room(visits, slot)
        except WorkerDiedError as error:
            with self._lock:
                is_wanted = visits[0].message_id in self._running
            # Several messages are handled again in smaller assignments, which need less.
            if len(visits) > 1:
                raise
            self._memory.learn(error.peak_bytes)
            if not error.is_out_of_memory or not is_wanted:
                raise
            first = str(error).partition("\n")[0].rstrip(".")
            killed = error.with_traceback(None)  # without its frames, which have the messages
        log(WARNING, "%s. It is handled again while no other message is", first)
        try:
            return self._run_in_room(visits, slot, alone=True)
        except LeaseTimeoutError as late:
            raise LeaseTimeoutError(f"{first}. {late}") from killed

    def _run_in_room(self, visits: Sequence[Visit], slot: Slot, *, alone: bool = False) -> list[Handled]:
        messages = [visit.message for visit in visits]
        contexts = [self._context_of(visit) for visit in visits]
        own = self._own(visits[0])
        label = message_call.label_of(messages[0].metadata.message_type, contexts)

        def check() -> None:
            if slot.is_cancelled:
                raise WorkerDiedError(f"{label} was cancelled before it had a worker")

        room = self._memory.room(
            label,
            has_lease=slot.has_lease,
            alone=alone,
            check=check,
            before_wait=slot.wait,
            timeout_s=self._settings(own, contexts[0]).host.timeout_s if alone else math.inf,
        )
        with room:
            if alone:
                self._end_unused_workers(slot)
            replies = message_call.call_many(
                self._task,
                (self._work.app, [visit.seed for visit in visits], own.get("slow_down", 1.0)),
                messages,
                contexts,
                lambda: self._settings(own, contexts[0]),
                name=_measured(self._work.name, own),
                workers=slot,
            )
        call_s = self._learn(visits, slot)
        pairs = zip(contexts, replies, strict=True)
        return [
            Handled(context, reply, call_s=None if reply.has_error() else call_s) for context, reply in pairs
        ]

    def _end_unused_workers(self, slot: Slot) -> None:
        """End all workers that wait for a message, so that their memory is free for the one of a slot."""
        with self._lock:
            others = [other for other in self._slots if other is not slot]
        for other in others:
            other.retire()
        slot.end_idle()

    def _learn(self, visits: Sequence[Visit], slot: Slot) -> float | None:
        """Learn from a call that is done. Return its seconds per message, or None if they say nothing."""
        self._memory.learn(slot.line.peak_bytes)
        if self._work.calls_per_worker == 1 and (
            advice := self._starts.learn(slot.ready_s, slot.line.call_s)
        ):
            log(INFO, "%s", advice)
        self._has_used = self._has_used or slot.is_used_again
        # A call with imports was longer than later ones: their workers are forked with these imports.
        call_s = None if slot.line.had_imports else slot.line.call_s
        message_type = visits[0].message.metadata.message_type
        if slot.max_messages > 1 and self._may_batch(message_type):
            limit = min(slot.max_messages, self._work.calls_per_worker)
            self.batches.learn(message_type, limit, len(visits), call_s)
        return None if call_s is None else call_s / len(visits)

    def _may_batch(self, message_type: str) -> bool:
        """Return True if messages of a type may share an assignment, if the app takes several at once."""
        if message_type not in self._differ:  # it takes a while where there are many clients
            self._differ[message_type] = self._nodes.clients.differ(message_type)
        is_exact = self._work.is_deterministic or self._verifier is not None
        return not is_exact and not self._differ[message_type]

    def _own(self, visit: Visit) -> Own:
        metadata = visit.message.metadata
        return self._nodes.own(metadata.dst_node_id, metadata.message_type)

    def _context_of(self, visit: Visit) -> Context:
        return self._nodes.context_of(visit.message.metadata.dst_node_id, visit.state)

    def _no_reply(self, visit: Visit) -> WorkerDiedError:
        client = message_call.client_of(self._context_of(visit))
        return WorkerDiedError(f"the message to client {client} was given up")

    def _settings(self, own: Own, context: Context) -> CallSettings:
        # The configs of nodes differ by their partition only.
        if id(own) not in self._resolved:
            options = {**joined(self._options, resources(own)), "context": context}
            if "gpu" in own:  # else the variable of this process comes before it
                options["env"] = {**(options.get("env") or {}), CALL["gpu"].variable: own["gpu"]}
            found = call_settings(options)
            gpu = replace(found.gpu, inventory=self._inventory)
            self._resolved[id(own)] = replace(found, gpu=gpu, own=as_written(own))
        return self._resolved[id(own)]

    def idle(self) -> None:
        """Let this thread's worker idle: no message waits. With a lease, others may need its room."""
        if hasattr(self._here, "slot"):
            self._here.slot.idle()

    def leave(self) -> None:
        """Let this thread's worker end: there will be no message."""
        if hasattr(self._here, "slot"):
            self._here.slot.retire()

    def cancel(self, message_id: str) -> None:
        """End the worker that handles a message; its changes of the node's state are dropped."""
        with self._lock:
            self._given_up.append(message_id)
            slot = self._running.pop(message_id, None)
            # With the lock: the slot cannot have another message meanwhile. The others of a batch go on.
            if slot is not None and slot not in self._running.values():
                slot.cancel()
        self._memory.wake()

    def cancel_all(self) -> None:
        """End all workers that handle a message; no other message is handled."""
        with self._lock:
            self._is_over = True
            for slot in self._running.values():
                slot.cancel()
            self._running.clear()
        self._memory.wake()

    def longest_wait_s(self) -> float:
        """Return since when a message waits for a lease, for cores or for memory; 0 where none does."""
        with self._lock:
            waiting = [slot.waits_since for slot in self._running.values()]
        return max((time.monotonic() - since for since in waiting if since is not None), default=0.0)

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so."""
        with self._lock:
            since = [slot.waits_since for slot in self._running.values()]
            waiting = [one for one in since if one is not None]
            return max(min(waiting), self._worked_at) if waiting and len(waiting) == len(since) else None

    def facts(self) -> dict[str, Any]:
        """Return the facts for the result."""
        verified = {} if self._verifier is None else self._verifier.facts()
        return {
            "workers_started": self._others_started + sum(slot.workers_started for slot in self._slots),
            "peak_worker_bytes": self._memory.largest_bytes,
            "waits_for_host_memory": self._memory.waits,
            **self._starts.facts(),
            "batches": self.batches.facts(),
            "recycling": {
                "calls_per_worker": self._work.calls_per_worker,
                "is_used_again": self._has_used,
                **verified,
            },
        }

    def close(self) -> None:
        """End what is left; no thread handles messages any more."""
        for slot in self._slots:
            slot.close()

    def _slot(self) -> Slot:
        if not hasattr(self._here, "slot"):
            self._here.slot = self._new_slot()
            with self._lock:
                self._slots.append(self._here.slot)
        slot: Slot = self._here.slot
        return slot


def _measured(name: str, own: Own) -> str:
    """Return whose footprint a call tells: a client with a share of its own may need more than the others."""
    sizes = [str(own[each]) for each in ("num_gpus", "gpu_memory") if each in own]
    return " ".join([name, *sizes])


def _end_of_run(error: FlowerGPUError) -> FlowerGPUError:
    """Return what a strict run ends with after an error of a message; the error itself where it goes on."""
    operation = frameworks.not_deterministic(str(error))
    if operation is not None:
        label = str(error).partition(":")[0]
        text = f"{label}: {operation}. Use another operation, or run without --deterministic"
    elif isinstance(error, _ACCIDENTS):
        tries = f" {_TRIES} workers have tried." if isinstance(error, _TRIED_AGAIN) else ""
        text = f"{error}\nWithout this reply the model would be another one, so the run ends.{tries}"
    else:
        return error
    end = NotDeterministicError(text)
    end.__cause__ = error
    return end
