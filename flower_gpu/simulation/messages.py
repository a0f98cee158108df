"""How a message to a virtual node is handled: in a worker with a lease, which loads the app."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, Final, TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.logger import log

from flower_gpu import frameworks, trace
from flower_gpu.calls.settings import CallSettings, call_settings
from flower_gpu.errors import (
    FlowerGPUError,
    GPUError,
    NotDeterministicError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from flower_gpu.flower import message_call
from flower_gpu.flower.records import round_of
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.host_memory import HostMemory
from flower_gpu.simulation.in_worker import AppReference, handle, handle_deterministically, seed_of
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.slots import Slot
from flower_gpu.simulation.verifying import Differences, Handled, Verifier, differences

T = TypeVar("T")

#: How many messages a worker handles if nobody says how many: only the kernel and other users end it before.
MANY: Final = 1000
#: Metrics in which a reply tells how many examples its client has: of the Message API, and of a NumPyClient.
# What another run would not have: no client's own error.
_ACCIDENTS: Final = (WorkerDiedError, WorkerStartError, WorkerTimeoutError, GPUError)
# Of these, what another try may not have either.
_TRIED_AGAIN: Final = (WorkerDiedError, WorkerStartError)
_TRIES: Final = 3  # of a message in a deterministic run


class Seeds:
    """Seeds of a run's messages: each the same whatever came before, so that a run that goes on has it, too.

    ``seed``: the run's.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()  # of the newest round
        self._round = 0

    def __call__(self, message: Message) -> int:
        """Return a message's seed; another one where its client was sent the same kind in the same round."""
        number = round_of(message)
        with self._lock:
            if number is not None and number > self._round:
                self._round = number
                self._sent.clear()
            place = f"{self._seed} {message.metadata.dst_node_id} {message.metadata.message_type} {number}"
            seed = seed_of(f"{place} {self._sent[place]}")
            self._sent[place] += 1
        return seed


class MessageHandler:
    """Handles messages of one run.

    ``app``: what handles them in a worker.
    ``nodes``: whose messages these are.
    ``options``: of each call, as for :class:`flower_gpu.CallOptions`.
    ``name``: by which the footprint of the app's calls is known.
    ``seed_of``: returns the seed of the client's random numbers for a message.
    ``new_slot``: makes what runs the calls of one thread.
    ``calls_per_worker``: how many messages a worker handles, at most.
    ``durations``: learns what messages take.
    ``verifier``: compares what used workers and new ones give; then messages are handled more than once.
    ``tries``: how often a message is handled, at most, whose worker dies.
    ``is_deterministic``: whether algorithms must give the same bits each time. Then there are three tries.
    ``is_strict``: whether a failure that another run would not have ends the run.
    """

    def __init__(
        self,
        app: AppReference | ClientApp,
        nodes: VirtualNodes,
        options: Mapping[str, Any],
        name: str,
        seed_of: Callable[[Message], int],
        new_slot: Callable[[], Slot],
        calls_per_worker: int = MANY,
        durations: Durations | None = None,
        *,
        verifier: Verifier | None = None,
        tries: int = 1,
        is_deterministic: bool = False,
        is_strict: bool = False,
    ) -> None:
        self._task = handle_deterministically if is_deterministic else handle
        self._tries = _TRIES if is_deterministic else tries
        self._is_strict = is_strict
        self._app = app
        self._nodes = nodes
        self._options = dict(options)
        self._name = name
        self._seed_of = seed_of
        self._new_slot = new_slot
        self._here = threading.local()
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._others_started = 0  # workers that were in none of these slots
        self._has_used = False  # whether a worker has handled a second message
        self._running: dict[str, Slot] = {}
        self._is_over = False
        self._worked_at = 0.0  # when a message was done last
        self._calls_per_worker = calls_per_worker
        self._verifier = verifier
        self._durations = Durations() if durations is None else durations
        self._memory = HostMemory()
        self._resolved: CallSettings | None = None

    def __call__(self, message: Message) -> Message:
        """Have a worker handle a message; the node keeps what that did to its state."""
        metadata = message.metadata
        slot = self._slot()
        seed = self._seed_of(message)
        with self._lock:
            if self._is_over:
                raise WorkerStartError("the run is over")
            slot.begin()
            self._running[metadata.message_id] = slot
        try:
            reply, context = self._handled(message, seed, slot)
        except FlowerGPUError as error:
            if self._is_strict and (end := _end_of_run(error)) is not None:
                raise end from error
            raise
        finally:
            with self._lock:
                is_wanted = self._running.pop(metadata.message_id, None) is not None
                self._worked_at = time.monotonic()
        if not is_wanted:  # it was done at the very moment when it was given up
            raise _given_up(context)
        self._nodes.keep(context)
        return reply

    def _handled(self, message: Message, seed: int, slot: Slot) -> tuple[Message, Context]:
        """Have a message handled: once, unless used workers are to be verified."""
        slot.go_on(self._calls_per_worker)
        if self._verifier is None or not slot.may_use_again:
            return self._run_and_learn(message, seed, slot)
        used = self._handled_more(message, seed, slot)
        was_used = slot.is_used_again
        self._has_used = self._has_used or was_used
        if slot.has_lease:
            slot.retire()  # its room may be all that there is
            slot.go_on(1)
            reply, context = self._run_and_learn(message, seed, slot)
        else:
            reply, context = self._in_new_worker(message, lambda new: self._run_and_learn(message, seed, new))
        if was_used:
            new = Handled(context, reply)
            found = differences(new, used)
            noise: Differences = {}
            if found:
                again = self._in_new_worker(message, lambda slot: self._handled_more(message, seed, slot))
                noise = differences(new, again)
            client = message_call.client_of(context)
            self._verifier.compared(message.metadata.message_type, client, found, noise)
        return reply, context

    def _handled_more(self, message: Message, seed: int, slot: Slot) -> Handled:
        """Have a message handled once more than it was sent: nothing is kept of it, and nothing traced."""
        try:
            with trace.muted():
                reply, context = self._run(message, seed, slot)
        except FlowerGPUError as error:
            return Handled(self._nodes.context_of(message.metadata.dst_node_id), error=error)
        return Handled(context, reply)

    def _in_new_worker(self, message: Message, run: Callable[[Slot], T]) -> T:
        """Run something in a slot of its own, which ends with it."""
        slot = self._new_slot()
        with self._lock:
            if message.metadata.message_id not in self._running:
                raise _given_up(self._nodes.context_of(message.metadata.dst_node_id))
            slot.begin()
            self._running[message.metadata.message_id] = slot
        try:
            return run(slot)
        finally:
            slot.close()
            with self._lock:
                self._others_started += slot.workers_started

    def _run_and_learn(self, message: Message, seed: int, slot: Slot) -> tuple[Message, Context]:
        """Have a message handled, and learn what that took if it succeeded."""
        reply, context = self._run(message, seed, slot)
        self._has_used = self._has_used or slot.is_used_again
        # A call with imports was longer than later ones: their workers are forked with these imports.
        if not reply.has_error() and not slot.had_imports:
            partition = self._nodes.partition_of(context.node_id)
            self._durations.learn(message.metadata.message_type, partition, slot.call_s)
        return reply, context

    def _run(self, message: Message, seed: int, slot: Slot) -> tuple[Message, Context]:
        """Have a message handled; where its worker dies, a few times."""
        for left in reversed(range(self._tries)):
            try:
                return self._run_once(message, seed, slot)
            except _TRIED_AGAIN as error:
                with self._lock:
                    is_wanted = message.metadata.message_id in self._running
                if not left or not is_wanted:
                    raise
                first = str(error).partition("\n")[0].rstrip(".")
                log(WARNING, "%s. A new worker handles the message again", first)
        raise AssertionError

    def _run_once(self, message: Message, seed: int, slot: Slot) -> tuple[Message, Context]:
        context = self._nodes.context_of(message.metadata.dst_node_id)
        partition = str(self._nodes.partition_of(context.node_id))
        with self._memory.room(at_once=slot.has_lease):
            reply = message_call.call(
                self._task,
                (self._app, seed),
                message,
                context,
                lambda: self._settings(context).named(partition),
                name=self._name,
                passed_on=(LoadClientAppError,),
                workers=slot,
            )
        self._memory.learn(slot.peak_bytes)
        return reply, context

    def _settings(self, context: Context) -> CallSettings:
        # The configs of nodes differ by their partition only.
        if self._resolved is None:
            self._resolved = call_settings({**self._options, "context": context})
        return self._resolved

    def idle(self) -> None:
        """Let this thread's worker idle: no message waits. With a lease, others may need its room."""
        if hasattr(self._here, "slot"):
            self._here.slot.idle()

    def leave(self) -> None:
        """Let this thread's worker end: there will be no message."""
        if hasattr(self._here, "slot"):
            self._here.slot.retire()

    def cancel(self, message: Message) -> None:
        """End the worker that handles a message; what it did to the node's state is forgotten."""
        with self._lock:
            slot = self._running.pop(message.metadata.message_id, None)
            if slot is not None:  # with the lock: the slot cannot have another message meanwhile
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
        """Return what the result is to hold of this."""
        verified = {} if self._verifier is None else self._verifier.facts()
        return {
            "workers_started": self._others_started + sum(slot.workers_started for slot in self._slots),
            "peak_worker_bytes": self._memory.largest_bytes,
            "waits_for_host_memory": self._memory.waits,
            "recycling": {
                "calls_per_worker": self._calls_per_worker,
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


def _end_of_run(error: FlowerGPUError) -> NotDeterministicError | None:
    """Return what a strict run is to be ended with after an error of a message; None where it goes on."""
    operation = frameworks.not_deterministic(str(error))
    if operation is not None:
        label = str(error).partition(":")[0]
        return NotDeterministicError(
            f"{label}: {operation}. Use another operation, or run without --deterministic"
        )
    if isinstance(error, _ACCIDENTS):
        tries = f" {_TRIES} workers have tried." if isinstance(error, _TRIED_AGAIN) else ""
        return NotDeterministicError(
            f"{error}\nWithout this reply the model would be another one, so the run ends.{tries}"
        )
    return None


def _given_up(context: Context) -> WorkerDiedError:
    return WorkerDiedError(f"the message to client {message_call.client_of(context)} was given up")
