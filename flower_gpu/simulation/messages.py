"""How a message to a virtual node is handled: in a worker with a lease, which loads the app."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.supercore.object_ref import load_app

from flower_gpu import frameworks
from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import WorkerDiedError
from flower_gpu.flower import message_call
from flower_gpu.flower.records import round_of
from flower_gpu.simulation.fresh import ProcessState, seed_all, seed_of
from flower_gpu.simulation.host_memory import HostMemory
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.slots import Slot
from flower_gpu.simulation.verification import Verification
from flower_gpu.workers.forkserver.run_worker import leave_after_this_call, may_stay


@dataclass(frozen=True)
class AppReference:
    """A ClientApp that workers import."""

    folder: Path  # the app's folder, which goes first on ``sys.path``
    name: str  # ``"package.module:attribute"``

    def load(self) -> ClientApp:
        """Import it.

        Raises
        ------
        LoadClientAppError
            If that fails, or it is something else.
        """
        app = load_app(self.name, LoadClientAppError, self.folder)
        if not isinstance(app, ClientApp):
            raise LoadClientAppError(f"{self.name} is a {type(app).__name__}, not a ClientApp")
        return app


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
        self._sent: Counter[str] = Counter()
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
            place = f"{self._seed} {metadata.dst_node_id} {metadata.message_type} {round_of(message)}"
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


def handle(
    app: AppReference | ClientApp,
    seed: int,
    message: Message,
    context: Context,
    identity: Mapping[str, Any],
) -> tuple[Message, RecordDict]:
    """Handle a message; runs in a worker."""
    loaded = _load(app, seed) if isinstance(app, AppReference) else app
    with as_first(seed):
        return message_call.run(loaded, None, message, context, identity)


_loaded: dict[AppReference, ClientApp] = {}
_found: ProcessState | None = None


def _load(app: AppReference, seed: int) -> ClientApp:
    if app not in _loaded:
        seed_all(seed)  # what the app's modules draw when they are imported is the client's, too
        _loaded[app] = app.load()
    return _loaded[app]


@contextmanager
def as_first(seed: int) -> Iterator[None]:
    """Let a client find, in the block, what the first one of this process has found, but for the modules.

    Parameters
    ----------
    seed : int
        Of its random numbers.
    """
    global _found
    if _found is not None:
        _found.restore()
    elif may_stay():
        _found = ProcessState()
    seed_all(seed)
    had = frameworks.loaded()
    try:
        yield
    finally:
        if any(next(new.settings(), None) for new in frameworks.loaded() if new not in had):
            leave_after_this_call()  # nobody knows what flags it had before this client
