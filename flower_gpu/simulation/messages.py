"""How a message to a virtual node is handled: in a worker with a lease, which loads the app."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.logger import log

from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import WorkerDiedError
from flower_gpu.flower import message_call
from flower_gpu.flower.records import records_in, round_of
from flower_gpu.simulation.host_memory import HostMemory
from flower_gpu.simulation.in_worker import AppReference, handle, seed_of
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.slots import Slot


class MessageHandler:
    """Handles messages of one run.

    Parameters
    ----------
    app : AppReference or ClientApp
        What handles them in a worker.
    nodes : VirtualNodes
        Whose messages these are.
    options : mapping
        Of each call, as for :class:`flower_gpu.CallOptions`.
    name : str
        By which the footprint of the app's calls is known.
    seed : int
        Of the clients' random numbers.
    new_slot : callable
        Makes what runs the calls of one thread.
    verification : Verification, optional
        Compares replies of workers that are used again with those of new ones.
    """

    def __init__(
        self,
        app: AppReference | ClientApp,
        nodes: VirtualNodes,
        options: Mapping[str, Any],
        name: str,
        seed: int,
        new_slot: Callable[[], Slot],
        verification: Verification | None = None,
    ) -> None:
        self._app = app
        self._nodes = nodes
        self._options = dict(options)
        self._name = name
        self._seed = seed
        self._new_slot = new_slot
        self._here = threading.local()
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._running: dict[str, Slot] = {}
        self._sent: Counter[str] = Counter()  # of the newest round
        self._round = 0
        self._verification = verification
        self._memory = HostMemory()
        self._resolved: CallSettings | None = None

    def __call__(self, message: Message) -> Message:
        """Have a worker handle a message; the node keeps what that did to its state."""
        metadata = message.metadata
        context = self._nodes.context_of(metadata.dst_node_id)
        slot = self._slot()
        with self._lock:
            # The same numbers whatever came before, so that a run that goes on has the same ones, too.
            number = round_of(message)
            if number is not None and number > self._round:
                self._round = number
                self._sent.clear()
            place = f"{self._seed} {metadata.dst_node_id} {metadata.message_type} {number}"
            seed = seed_of(f"{place} {self._sent[place]}")
            self._sent[place] += 1
            slot.begin()
            self._running[metadata.message_id] = slot
        try:
            reply = self._run(message, context, seed, slot)
            if slot.is_used_again:
                self._verify(message, seed, reply)
        finally:
            with self._lock:
                is_wanted = self._running.pop(metadata.message_id, None) is not None
        if not is_wanted:  # it was done at the very moment when it was given up
            raise WorkerDiedError(f"the message to client {message_call.client_of(context)} was given up")
        self._nodes.keep(context)
        return reply

    def _run(self, message: Message, context: Context, seed: int, slot: Slot) -> Message:
        partition = str(self._nodes.partition_of(context.node_id))
        with self._memory.room(at_once=slot.has_lease):
            reply = message_call.call(
                handle,
                (self._app, seed),
                message,
                context,
                lambda: self._settings(context).named(partition),
                name=self._name,
                passed_on=(LoadClientAppError,),
                workers=slot,
            )
        self._memory.learn(slot.peak_bytes)
        return reply

    def _settings(self, context: Context) -> CallSettings:
        # The configs of nodes differ by their partition only.
        if self._resolved is None:
            self._resolved = CallSettings.resolve({**self._options, "context": context})
        return self._resolved

    def _verify(self, message: Message, seed: int, reply: Message) -> None:
        if self._verification is None:
            return
        context = self._nodes.context_of(message.metadata.dst_node_id)  # as it was: it is kept later
        self._slot().retire()  # its lease may be all that there is

        def again() -> Message:
            slot = self._new_slot()
            slot.calls_per_worker = 1
            with self._lock:
                if message.metadata.message_id not in self._running:
                    raise WorkerDiedError("the message was given up")
                self._running[message.metadata.message_id] = slot
            try:
                return self._run(message, context, seed, slot)
            finally:
                slot.close()

        self._verification.verify(message_call.client_of(context), reply, again)

    def idle(self) -> None:
        """Let this thread's worker end if it has a lease: no message waits, and others may need the GPU."""
        if hasattr(self._here, "slot") and self._here.slot.has_lease:
            self._here.slot.retire()

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

    def facts(self) -> dict[str, Any]:
        """Return what the summary is to hold of this."""
        facts: dict[str, Any] = {
            "workers_started": sum(slot.workers_started for slot in self._slots),
            "peak_worker_bytes": self._memory.largest_bytes,
            "waits_for_host_memory": self._memory.waits,
        }
        if self._verification is not None:
            facts["recycling"] = self._verification.facts()
        return facts

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


@dataclass
class Verification:
    """Compares the replies to some messages with those of new workers."""

    checks: int  # how many messages are compared
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taken: int = 0
    _largest: float = 0.0
    _different: list[str] = field(default_factory=list)

    def verify(self, client: str, reply: Message, again: Callable[[], Message]) -> None:
        """Have a message handled again, if there were not enough yet, and compare the weights.

        Parameters
        ----------
        client : str
            Whose message it is.
        reply : Message
            What a used worker has answered.
        again : callable
            Has a new worker handle the message.
        """
        with self._lock:
            if self._taken >= self.checks:
                return
            self._taken += 1
        found = difference(reply, again())
        with self._lock:
            self._largest = max(self._largest, found)
            if found:
                self._different.append(client)
        if found:
            log(
                WARNING,
                "Client %s: a worker that had handled other messages gave other weights than a new one "
                "(largest difference %.3g of the largest weight). The app keeps something in its modules "
                "from one call to the next: use calls_per_worker=1, or find it",
                client,
                found,
            )

    def facts(self) -> dict[str, Any]:
        """Return what was found, for the summary."""
        return {
            "compared": self._taken,
            "different_clients": list(self._different),
            "largest_relative_difference": self._largest,
        }


def difference(one: Message, other: Message) -> float:
    """Return the largest difference between the arrays of two replies, relative to the largest value.

    Returns
    -------
    float
        0 if they are the same, bit for bit; infinity if there are other arrays.
    """
    found, others = (
        {
            (name, key): array.numpy()
            for name, record in records_in(message, ArrayRecord).items()
            for key, array in record.items()
        }
        for message in (one, other)
    )
    if list(found) != list(others):
        return float("inf")
    largest = 0.0
    for name, a in found.items():
        b = others[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if a.tobytes() != b.tobytes():
            a, b = a.astype(np.float64), b.astype(np.float64)
            scale = max(float(np.max(np.abs(a), initial=0.0)), float(np.finfo(np.float64).tiny))
            relative = float(np.max(np.abs(a - b), initial=0.0)) / scale
            largest = max(largest, relative if relative == relative else float("inf"))
    return largest
