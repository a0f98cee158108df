"""How a message to a virtual node is handled: in a worker with a lease, while the host has memory for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import WARNING
from typing import Any, Final

from flwr.app import Context
from flwr.common.logger import log

from flower_gpu import control_group, frameworks, trace
from flower_gpu.calls.settings import CallSettings, call_settings
from flower_gpu.errors import (
    FlowerGPUError,
    GPUError,
    NotDeterministicError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from flower_gpu.flower import message_call, record_bytes
from flower_gpu.leases.host import RESERVED_PART
from flower_gpu.options import CALL, joined
from flower_gpu.simulation.batch import handle_batch
from flower_gpu.simulation.clients import Own, as_written, resources
from flower_gpu.simulation.host import Answer, Visit, Work, failed
from flower_gpu.simulation.in_worker import handle_alone, handle_deterministically
from flower_gpu.simulation.slots import Slot
from flower_gpu.simulation.verifying import Differences, Handled, Verifier, differences

_LOOK_S = 0.1  # asking the kernel takes longer than a small message
_POLL_S = 0.2  # others on the host give memory back, too
_GROWTH_S = 2.0  # from a worker's start until it has most of its memory


class HostMemory:
    """Lets workers start while there is memory for as much as the largest one took so far.

    ``available``: as :func:`flower_gpu.control_group.available_memory`.
    """

    def __init__(self, available: Callable[[], tuple[int, int]] = control_group.available_memory) -> None:
        self._available = available
        self._changed = threading.Condition()
        self._running = 0
        #: The most that a worker took so far.
        self.largest_bytes = 0
        self._looked, self._found = -_LOOK_S, available()
        self._started: list[float] = []
        #: How often a worker had to wait.
        self.waits = 0

    @contextmanager
    def room(self, *, at_once: bool = False) -> Iterator[None]:
        """Wait until there is room for a worker. There always is for the first one.

        ``at_once``: do not wait: the worker is there, and has what others who are let in wait for.
        """
        with self._changed:
            if not at_once and not self._has_room():
                self.waits += 1
                while not self._has_room():
                    self._changed.wait(_POLL_S)
            self._running += 1
            began = time.monotonic()
            self._started.append(began)
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._started.remove(began)
                self._changed.notify()

    def learn(self, worker_bytes: int) -> None:
        """Note a worker's memory."""
        self.largest_bytes = max(self.largest_bytes, worker_bytes)

    def _has_room(self) -> bool:
        if not self._running:
            return True
        now = time.monotonic()
        if now > self._looked + _LOOK_S:
            self._looked, self._found = now, self._available()
        available, total = self._found
        # Those that were let in just now have not taken theirs yet.
        recent = sum(began > now - _GROWTH_S for began in self._started)
        return available >= self.largest_bytes * (1 + recent) + RESERVED_PART * total


# What another run would not have: no client's own error.
_ACCIDENTS: Final = (WorkerDiedError, WorkerStartError, WorkerTimeoutError, GPUError)
# Of these, what another try may not have either.
_TRIED_AGAIN: Final = (WorkerDiedError, WorkerStartError)
_TRIES: Final = 3  # of a message in a deterministic run
_MOST_GIVEN_UP: Final = 1000  # messages that are remembered: they may come later


class MessageHandler:
    """Handles messages of one run, one at a time in each thread, which may keep a worker for the next one.

    ``work``: the run's.
    ``options``: of each call, as for :class:`flower_gpu.CallOptions`.
    ``new_slot``: makes what runs the calls of one thread.
    ``tries``: how often a message is handled, at most, whose worker dies; three times in a deterministic run.
    """

    def __init__(
        self,
        work: Work,
        options: Mapping[str, Any],
        new_slot: Callable[[], Slot],
        *,
        tries: int = 1,
    ) -> None:
        self._work = work
        self._task = handle_deterministically if work.is_deterministic else handle_alone
        self._tries = _TRIES if work.is_deterministic else tries
        self._nodes = work.nodes
        self._options = dict(options)
        self._new_slot = new_slot
        self._here = threading.local()
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._others_started = 0  # workers that were in none of these slots
        self._most_together: dict[str, int] = {}  # messages in a batch, by their kind
        self._has_used = False  # whether a worker has handled a second message
        self._running: dict[str, Slot] = {}
        self._given_up: deque[str] = deque(maxlen=_MOST_GIVEN_UP)
        self._is_over = False
        self._worked_at = 0.0  # when a message was done last
        self._verifier = Verifier() if work.verify_recycling else None
        self._memory = HostMemory()
        self._resolved: dict[int, CallSettings] = {}  # by what a client has of its own

    def most_together(self, kind: str) -> int:
        """Return how many messages of a kind are one batch, at most; 1, as far as is known: they are none."""
        return 1 if self._verifier else min(self._most_together.get(kind, 1), self._work.calls_per_worker)

    def are_alike(self, visit: Visit, other: Visit) -> bool:
        """Tell whether messages can be of one batch: of a kind, to clients with the same of their own."""
        kinds = {each.message.metadata.message_type for each in (visit, other)}
        own = self._own(visit)
        return len(kinds) == 1 and self._own(other) is own and "slow_down" not in own

    def __call__(self, *visits: Visit) -> list[Answer]:
        """Have one worker handle a message, or several as a batch, each with the answer that it has alone.

        Whatever is raised is in the answer, in the place of the reply.
        """
        began = time.monotonic()
        slot = self._slot()
        with self._lock:
            is_over = self._is_over
            begun = [each for each in visits if not (is_over or each.message_id in self._given_up)]
            if begun:
                slot.begin()
            self._running.update((each.message_id, slot) for each in begun)
        found: Sequence[Handled | BaseException]
        try:
            if len(begun) > 1:
                found = self._run_batch(begun, slot)
            else:
                found = [self._handle(each, slot) for each in begun]
        except BaseException as error:  # a SystemExit is the client's, not this thread's
            found = [error] * len(begun)
        with self._lock:
            handled = {
                visit.message_id: each
                for visit, each in zip(begun, found, strict=True)
                if self._running.pop(visit.message_id, None)  # else it was given up, maybe when it was done
            }
            self._worked_at = time.monotonic()
        seconds = (time.monotonic() - began) / len(visits)
        answers: list[Answer] = []
        for visit in visits:
            one: Handled | BaseException | None = handled.get(visit.message_id)
            if is_over:
                one = WorkerStartError("the run is over")
            elif one is None:
                one = self._no_reply(visit)
            elif len(begun) > 1 and self._tries > 1 and isinstance(one, _TRIED_AGAIN):
                answers += self(visit)  # whoever it was that ended the worker
                continue
            elif self._work.is_strict and isinstance(one, FlowerGPUError):
                one = _end_of_run(one)
            if isinstance(one, Handled):
                state = record_bytes.encode(one.context.state) if one.context.state else b""
                answers.append(Answer(visit.message_id, one.reply, state, seconds, one.call_s))
            else:
                answers.append(Answer(visit.message_id, failed(visit.message, one), seconds=seconds))
        return answers

    def _handle(self, visit: Visit, slot: Slot) -> Handled:
        """Have a message handled: once, unless used workers are to be verified."""
        slot.go_on(self._work.calls_per_worker)
        if self._verifier is None or not slot.may_use_again:
            return self._run(visit, slot)
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
            self._verifier.compared(visit.message.metadata.message_type, client, found, noise)
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
                return self._run_once(visit, slot)
            except _TRIED_AGAIN as error:
                with self._lock:
                    is_wanted = visit.message_id in self._running
                if not left or not is_wanted:
                    raise
                first = str(error).partition("\n")[0].rstrip(".")
                log(WARNING, "%s. A new worker handles the message again", first)
        raise AssertionError

    def _run_batch(self, visits: Sequence[Visit], slot: Slot) -> list[Handled | BaseException]:
        slot.go_on(self._work.calls_per_worker // len(visits))
        own = self._own(visits[0])
        contexts = [self._context_of(visit) for visit in visits]
        with self._memory.room(at_once=slot.has_lease):
            found = message_call.call_batch(
                handle_batch,
                (self._work.app,),
                [(each.seed, each.message, context) for each, context in zip(visits, contexts, strict=True)],
                self._settings(own, contexts[0]),
                name=_measured(self._work.name, own),
                workers=slot,
            )
        self._learn(visits[0], slot)
        call_s = None if slot.line.had_imports else slot.line.call_s / len(visits)
        return [
            reply if isinstance(reply, BaseException) else Handled(context, reply, call_s=call_s)
            for context, reply in zip(contexts, found, strict=True)
        ]

    def _run_once(self, visit: Visit, slot: Slot) -> Handled:
        context, own = self._context_of(visit), self._own(visit)
        with self._memory.room(at_once=slot.has_lease):
            reply = message_call.call(
                self._task,
                (self._work.app, visit.seed, own.get("slow_down", 1.0)),
                visit.message,
                context,
                lambda: self._settings(own, context).with_worker(name=message_call.client_of(context)),
                name=_measured(self._work.name, own),
                workers=slot,
            )
        self._learn(visit, slot)
        # A call with imports was longer than later ones: their workers are forked with these imports.
        is_usual = not reply.has_error() and not slot.line.had_imports
        return Handled(context, reply, call_s=slot.line.call_s if is_usual else None)

    def _learn(self, visit: Visit, slot: Slot) -> None:
        self._memory.learn(slot.line.peak_bytes)
        self._has_used = self._has_used or slot.is_used_again
        self._most_together[visit.message.metadata.message_type] = slot.most_together

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
            self._resolved[id(own)] = replace(call_settings(options), own=as_written(own))
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

    def cancel_all(self) -> None:
        """End all workers that handle a message; no other message is handled."""
        with self._lock:
            self._is_over = True
            for slot in self._running.values():
                slot.cancel()
            self._running.clear()

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
