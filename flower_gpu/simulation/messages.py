"""Handling messages to virtual nodes: each runs in a worker with a lease, while the host has memory for it.

The grid sends messages, and a host passes them on to a :class:`MessageHandler` in assignments. An assignment
is one message, or a batch that the app handles in a single call. The handler finds a worker, a lease and
memory, retries if a worker dies, and returns one outcome per message. It never raises a client's error: the
error is in the outcome.

Threads. A host calls the handler from several threads, each with one assignment at a time. Every assignment
has its own :class:`~flower_gpu.simulation.message_worker.MessageWorker`, which takes a worker from the pool
of the run for each try. ``cancel``, ``cancel_all`` and the methods that report waiting times come from other
threads. ``_lock`` protects the mapping from messages in flight to their workers.

Cancellation races with three things:

- A message may be cancelled before it arrives here, so ids of cancelled messages are remembered for a while.
- A worker goes on to another assignment as soon as a call ends. So ``cancel`` acts on the assignment's
  ``MessageWorker``, which knows whether it still has the worker.
- A message can be done at the moment when it is cancelled. Then its result is dropped, because the mapping no
  longer has it.

If GPU memory or main memory runs out, :mod:`flower_gpu.calls.tries` retries first, and an error arrives here
only after its last try. The second try after main memory ran out runs while no other message is in flight.
Then a message is retried at two levels, from the inside to the outside:

1. If the worker of a single message dies or cannot start, a new worker handles the message again. ``tries``
   limits the number of attempts.
2. A batch that runs out of GPU or main memory is split into smaller batches, and later batches are smaller
   too. If several tries are allowed and the worker of a batch dies, the batch is split into single messages,
   because any of them may have ended the worker.

A retry happens only while the message is still in the mapping, so a cancelled message is not handled again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Final

from flwr.app import Context
from flwr.common.logger import log

from flower_gpu import frameworks
from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import (
    FlowerGPUError,
    GPUError,
    GPUOutOfMemoryError,
    NotDeterministicError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from flower_gpu.flower import message_call, record_bytes
from flower_gpu.flower.records import round_of
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.simulation.batch_size import Batches
from flower_gpu.simulation.clients import ClientOverrides, settings_of
from flower_gpu.simulation.host import AssignedMessage, MessageOutcome, Work, failed
from flower_gpu.simulation.in_worker import handle, handle_deterministically
from flower_gpu.simulation.message_worker import MessageWorker
from flower_gpu.simulation.pool import WorkerPool
from flower_gpu.simulation.worker_starts import WorkerStarts

# Errors that another run might not have. An error of the client's own code is none of these.
_ACCIDENTS: Final = (WorkerDiedError, WorkerStartError, WorkerTimeoutError, GPUError)
# Accidents that a retry may avoid
_TRIED_AGAIN: Final = (WorkerDiedError, WorkerStartError)
# Attempts per message in a deterministic run
_TRIES: Final = 3
# Number of cancelled messages that are remembered, because they may arrive later
_MAX_CANCELLED: Final = 1000


class MessageHandler:
    """Handles assignments of one run: one message, or several that the app handles at once. Thread-safe.

    Each thread has one assignment at a time. The pool keeps its worker for a later one.

    ``work``: app, nodes and rules of the run.
    ``settings``: settings of each call on this host.
    ``pool``: the workers of the run on this host.
    ``workers``: number of assignments that are handled at the same time.
    ``tries``: maximum number of attempts if workers die. In a deterministic run it is always three.
    ``inventory``: the GPUs of this host. None: each call queries them.
    """

    def __init__(
        self,
        work: Work,
        settings: CallSettings,
        pool: WorkerPool,
        *,
        workers: int = 1,
        tries: int = 1,
        inventory: Inventory | None = None,
    ) -> None:
        self._work = work
        self._task = handle_deterministically if work.is_deterministic else handle
        self._tries = _TRIES if work.is_deterministic else tries
        self._nodes = work.nodes
        self._settings = settings
        self._inventory = inventory
        self._pool = pool
        self._lock = threading.Lock()
        #: Chooses how many messages are in one assignment.
        self.batches = Batches(workers)
        self._has_used = False  # True once a worker has handled a second message
        self._running: dict[str, MessageWorker] = {}
        self._workers_started = 0
        self._cancelled: deque[str] = deque(maxlen=_MAX_CANCELLED)
        self._is_closed = False
        self._worked_at = 0.0  # end of the last assignment
        self._starts = WorkerStarts(has_preload=bool(settings.worker.preload))
        # By message type: True if clients have different options
        self._clients_differ: dict[str, bool] = {}
        # By the id of the client's own options
        self._resolved: dict[int, CallSettings] = {}

    @staticmethod
    def may_share(assigned: AssignedMessage, other: AssignedMessage) -> bool:
        """Return True if two messages can be in one assignment, because they have the same type and round."""
        first, second = assigned.message, other.message
        if first.metadata.message_type != second.metadata.message_type:
            return False
        return round_of(first) == round_of(second)

    def __call__(self, *assigned_messages: AssignedMessage) -> list[MessageOutcome]:
        """Return the outcomes of an assignment, which one worker handles. Blocks until then.

        If a call fails, the outcome has the error in place of the reply.
        """
        began = time.monotonic()
        worker = MessageWorker(self._pool, self._work.calls_per_worker // len(assigned_messages))
        begun: list[AssignedMessage] = []
        with self._lock:
            if not self._is_closed:
                begun = [each for each in assigned_messages if each.message_id not in self._cancelled]
            self._running.update((assigned.message_id, worker) for assigned in begun)
        results: Sequence[MessageOutcome | BaseException] = []
        error: BaseException | None = None
        try:
            results = self._handle(begun, worker) if begun else []
        except BaseException as caught:
            # This includes SystemExit, because the client raised it and this thread goes on.
            error = caught
            contexts = [self._context_of(assigned) for assigned in begun]
            results = message_call.errors_of_each(error, begun[0].message.metadata.message_type, contexts)
        with self._lock:
            result_by_id = {
                assigned.message_id: result
                for assigned, result in zip(begun, results, strict=True)
                # A missing message was cancelled, possibly just when it was done.
                if self._running.pop(assigned.message_id, None)
            }
            self._worked_at = time.monotonic()
            self._workers_started += worker.workers_started
            smaller = self._smaller(error, begun)
        if smaller:
            parts = [
                assigned_messages[start : start + smaller]
                for start in range(0, len(assigned_messages), smaller)
            ]
            return [outcome for part in parts for outcome in self(*part)]
        self.batches.count(len(begun))
        seconds = (time.monotonic() - began) / len(assigned_messages)
        return [
            self._outcome_of(assigned, result_by_id.get(assigned.message_id), seconds)
            for assigned in assigned_messages
        ]

    def _outcome_of(
        self, assigned: AssignedMessage, result: MessageOutcome | BaseException | None, seconds: float
    ) -> MessageOutcome:
        """Return the outcome of a message. ``result`` is None if the message was cancelled."""
        if isinstance(result, MessageOutcome):
            return replace(result, seconds=seconds)
        if result is None:
            result = WorkerStartError("the run is over") if self._is_closed else self._no_reply(assigned)
        elif self._work.is_strict and isinstance(result, FlowerGPUError):
            result = _end_of_run(result)
        return MessageOutcome(assigned.message_id, failed(assigned.message, result), seconds=seconds)

    def _smaller(self, error: BaseException | None, assigned_messages: Sequence[AssignedMessage]) -> int:
        """Return the size of the smaller assignments for a retry of failed messages, or 0 for no retry."""
        is_killed = isinstance(error, WorkerDiedError) and error.is_out_of_memory
        if len(assigned_messages) > 1 and (is_killed or isinstance(error, GPUOutOfMemoryError)):
            size = self.batches.refuse(
                assigned_messages[0].message.metadata.message_type, len(assigned_messages)
            )
            log(
                WARNING,
                "%d messages at once are too many: %s. They are handled again, %d at once",
                len(assigned_messages),
                _reason(error),
                size,
            )
            return size
        if len(assigned_messages) > 1 and self._tries > 1 and isinstance(error, _TRIED_AGAIN):
            return 1  # any of the messages may have ended the worker
        return 0

    def _handle(
        self, assigned_messages: Sequence[AssignedMessage], worker: MessageWorker
    ) -> list[MessageOutcome]:
        """Return the results of messages, which one worker handles."""
        if len(assigned_messages) > 1:
            # After a failure, smaller assignments follow, because they need less memory.
            return self._run_once(assigned_messages, worker)
        return [self._run(assigned_messages[0], worker)]

    def _run(self, assigned: AssignedMessage, worker: MessageWorker) -> MessageOutcome:
        """Return the result of a message. If its worker dies, a new worker retries it."""
        for remaining in reversed(range(self._tries)):
            try:
                return self._run_once([assigned], worker)[0]
            except _TRIED_AGAIN as error:
                if not remaining or not self._is_wanted(assigned):
                    raise
                log(WARNING, "%s. A new worker handles the message again", _reason(error))
        raise AssertionError

    def _is_wanted(self, assigned: AssignedMessage) -> bool:
        """Return True unless the message was cancelled."""
        with self._lock:
            return assigned.message_id in self._running

    def _run_once(
        self, assigned_messages: Sequence[AssignedMessage], worker: MessageWorker
    ) -> list[MessageOutcome]:
        contexts = [self._context_of(assigned) for assigned in assigned_messages]
        overrides = self._overrides_of(assigned_messages[0])
        replies = message_call.call_many(
            self._task,
            (
                self._work.app,
                [assigned.seed for assigned in assigned_messages],
                overrides.get("slow_down", 1.0),
            ),
            [assigned.message for assigned in assigned_messages],
            contexts,
            self._settings_of(overrides),
            name=_measured(self._work.name, overrides),
            workers=worker,
        )
        call_s = self._learn(assigned_messages, worker)
        return [
            MessageOutcome(
                assigned.message_id,
                reply,
                record_bytes.encode(context.state) if context.state else b"",
                call_s=None if reply.has_error() else call_s,
            )
            for assigned, context, reply in zip(assigned_messages, contexts, replies, strict=True)
        ]

    def _learn(self, assigned_messages: Sequence[AssignedMessage], worker: MessageWorker) -> float | None:
        """Learn from a call that succeeded. Return its seconds per message, or None if not representative."""
        if self._work.calls_per_worker == 1 and (advice := self._starts.learn(worker.ready_s, worker.call_s)):
            log(INFO, "%s", advice)
        self._has_used = self._has_used or worker.is_used_again
        # A call that imported modules took longer than later calls will: their workers are forked with the
        # modules already imported.
        call_s = None if worker.had_imports else worker.call_s
        message_type = assigned_messages[0].message.metadata.message_type
        if worker.max_messages > 1 and self._may_batch(message_type):
            limit = min(worker.max_messages, self._work.calls_per_worker)
            self.batches.learn(message_type, limit, len(assigned_messages), call_s)
        return None if call_s is None else call_s / len(assigned_messages)

    def _may_batch(self, message_type: str) -> bool:
        """Return True if messages of a type may share an assignment, if the app accepts batches."""
        if message_type not in self._clients_differ:
            # Cached, because the comparison takes a while if there are many clients.
            self._clients_differ[message_type] = self._nodes.clients.differ(message_type)
        return not self._work.is_deterministic and not self._clients_differ[message_type]

    def _overrides_of(self, assigned: AssignedMessage) -> ClientOverrides:
        metadata = assigned.message.metadata
        return self._nodes.overrides_of(metadata.dst_node_id, metadata.message_type)

    def _context_of(self, assigned: AssignedMessage) -> Context:
        return self._nodes.context_of(assigned.message.metadata.dst_node_id, assigned.state)

    def _no_reply(self, assigned: AssignedMessage) -> WorkerDiedError:
        client = message_call.client_of(self._context_of(assigned))
        return WorkerDiedError(f"the message to client {client} was dropped")

    def _settings_of(self, overrides: ClientOverrides) -> CallSettings:
        if id(overrides) not in self._resolved:
            settings = settings_of(self._settings, overrides)
            gpu = replace(settings.gpu, inventory=self._inventory)
            self._resolved[id(overrides)] = replace(settings, gpu=gpu)
        return self._resolved[id(overrides)]

    def cancel(self, message_id: str) -> None:
        """End the worker that handles a message, and drop its changes of the node's state.

        The other messages of a batch go on, so the worker of a batch ends only with its last message.
        """
        with self._lock:
            self._cancelled.append(message_id)
            worker = self._running.pop(message_id, None)
            if worker is not None and worker not in self._running.values():
                worker.cancel()

    def cancel_all(self) -> None:
        """End all workers that handle a message, and accept no more messages."""
        with self._lock:
            self._is_closed = True
            for worker in self._running.values():
                worker.cancel()
            self._running.clear()

    def longest_wait_s(self) -> float:
        """Return the seconds that a message has been waiting for a lease, cores or memory, or 0.

        If several messages wait, the longest wait counts.
        """
        with self._lock:
            waiting = [worker.waits_since for worker in self._running.values()]
        return max((time.monotonic() - since for since in waiting if since is not None), default=0.0)

    def stuck_since(self) -> float | None:
        """Return the time since which messages have been waiting with no worker running, or None."""
        with self._lock:
            starts = [worker.waits_since for worker in self._running.values()]
            waiting = [start for start in starts if start is not None]
            return max(min(waiting), self._worked_at) if waiting and len(waiting) == len(starts) else None

    def facts(self) -> dict[str, Any]:
        """Return the facts for the result."""
        return {
            "workers_started": self._workers_started,
            "peak_worker_bytes": self._pool.memory.largest_bytes,
            "waits_for_host_memory": self._pool.memory_waits,
            **self._starts.facts(),
            "batches": self.batches.facts(),
            "recycling": {
                "calls_per_worker": self._work.calls_per_worker,
                "is_used_again": self._has_used,
            },
        }


def _reason(error: BaseException | None) -> str:
    """Return the first line of an error, as the start of a longer sentence."""
    return str(error).partition("\n")[0].rstrip(".")


def _measured(name: str, overrides: ClientOverrides) -> str:
    """Return the name under which the memory of a call is recorded.

    A client with its own share of a GPU may need more memory than the others, so it has its own footprint.
    """
    sizes = [str(overrides[key]) for key in ("num_gpus", "gpu_memory") if key in overrides]
    return " ".join([name, *sizes])


def _end_of_run(error: FlowerGPUError) -> FlowerGPUError:
    """Return the error that ends a strict run, or the message's own error if the run goes on."""
    operation = frameworks.not_deterministic(str(error))
    if operation is not None:
        label = str(error).partition(":")[0]
        text = f"{label}: {operation}. Use another operation, or run without --deterministic"
    elif isinstance(error, _ACCIDENTS):
        tries = f" {_TRIES} workers have tried." if isinstance(error, _TRIED_AGAIN) else ""
        text = f"{error}\nWithout this reply, the model would differ, so the run ends.{tries}"
    else:
        return error
    end = NotDeterministicError(text)
    end.__cause__ = error
    return end
