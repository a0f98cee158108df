"""The task of a simulation's worker: it loads the app and handles messages.

A used worker must behave like a new one. So each client finds the process in the state that the first client
found: settings and flags are restored, random numbers are seeded, and context variables are fresh. Modules
and their globals stay, because importing them again takes too long.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.supercore.object_ref import load_app

from flower_gpu import frameworks
from flower_gpu.apps.dependencies import missing_packages_named
from flower_gpu.flower import many, message_call
from flower_gpu.frameworks.framework import Framework
from flower_gpu.simulation.process_state import ProcessState
from flower_gpu.workers import events, threads
from flower_gpu.workers.own_process import facts

_SEED_WORDS: Final = 8  # length of a seed, in words of 32 bits


@dataclass(frozen=True)
class AppReference:
    """A ClientApp that workers import."""

    folder: Path  # folder of the app, the first one on ``sys.path``
    name: str  # ``"package.module:attribute"``

    def load(self) -> ClientApp:
        """Import and return the app.

        Raises LoadClientAppError if the import fails, or if the attribute is not a ClientApp.
        """
        with missing_packages_named(self.folder):
            app = load_app(self.name, LoadClientAppError, self.folder)
        if not isinstance(app, ClientApp):
            raise LoadClientAppError(f"{self.name} is a {type(app).__name__}, not a ClientApp")
        return app


#: Event of a worker whose app handles several messages of this type at once.
TAKES_MANY: Final = "takes_many"
#: Event of a worker that handles a single message. With ``is_step`` False the app's function begins, with
#: True it has reached the first step of an optimizer.
READY: Final = "ready"


def handle(
    app: AppReference | ClientApp,
    seeds: Sequence[int],
    slow_down: float,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    identity: Mapping[str, Any],
) -> list[message_call.Replied]:
    """Return the replies and states for the messages of one assignment. This runs in a worker.

    ``seeds``: one seed per message. The process is seeded for the first message. An app that handles several
    messages at once gets the other seeds from :func:`flower_gpu.message_seed`.
    ``slow_down``: factor for the duration of the app's function. Imports do not count, because the first
    message of a worker pays for them, whichever client it is for.
    """
    loaded = load(app, seeds[0])
    for message, seed in zip(messages, seeds, strict=True):
        many.seed_message(message, seed)
    handler = many.find_handler(loaded, messages[0].metadata.message_type)
    if handler is not None:
        events.send(TAKES_MANY, max_messages=handler.max_messages)
    with as_first(seeds[0]):
        began_s = time.monotonic() - facts.import_s
        # The copied context gives the client the context variables of a new worker.
        folder = app.folder if isinstance(app, AppReference) else None
        with _ready_told(), missing_packages_named(folder):
            handled = copy_context().run(_replies, loaded, handler, messages, contexts, identity)
        took_s = time.monotonic() - facts.import_s - began_s
        if slow_down > 1:
            # Shown by ``flower-gpu top`` and the trace
            events.send("progress", desc="slow-down", n=0, total=1)
            # The worker keeps its lease meanwhile, because a slow device would be busy all this time.
            time.sleep((slow_down - 1) * max(0.0, took_s))
        return handled


@contextmanager
def _ready_told() -> Iterator[None]:
    """Report in the block when a worker for a single message is ready to train."""
    if facts.may_stay:
        # A worker for several messages gets ready only once, so its time does not matter.
        yield
        return
    events.send(READY, is_step=False)
    with frameworks.at_first_step(lambda: events.send(READY, is_step=True)):
        yield


def handle_deterministically(
    app: AppReference | ClientApp, seeds: Sequence[int], *args: Any
) -> list[message_call.Replied]:
    """Handle a message with algorithms that give the same bits each time. Other algorithms raise an error."""

    def prepare(framework: Framework, is_new: bool) -> None:
        framework.be_deterministic()
        if is_new:
            # Later workers are forked with the framework loaded, and are seeded before the message. So a
            # framework that is imported during the message is seeded here.
            framework.seed(seeds[0])

    with frameworks.each_loaded(prepare):
        return handle(app, seeds, *args)


def _replies(
    app: ClientApp,
    handler: many.ManyHandler | None,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    identity: Mapping[str, Any],
) -> list[message_call.Replied]:
    if handler is not None and len(messages) > 1:
        return many.run_many(handler, messages, contexts, identity)
    pairs = zip(messages, contexts, strict=True)
    return [message_call.replied(app, *pair, identity) for pair in pairs]


_loaded: dict[AppReference, ClientApp] = {}
_initial_state: ProcessState | None = None


def load(app: AppReference | ClientApp, seed: int) -> ClientApp:
    """Return an app, imported once in this process."""
    if isinstance(app, ClientApp):
        return app
    if app not in _loaded:
        # The app's modules may draw random numbers when they are imported.
        seed_all(seed)
        _loaded[app] = app.load()
    return _loaded[app]


@contextmanager
def as_first(seed: int) -> Iterator[None]:
    """Seed this process, and restore the state that its first client found. The client runs in the block."""
    global _initial_state
    if _initial_state is not None:
        count = os.environ.get(threads.VARIABLE, "")
        _initial_state.restore()
        if count != os.environ.get(threads.VARIABLE, ""):
            # A client may have its own number of cores, which the restored state must not override.
            os.environ[threads.VARIABLE] = count
            threads.apply()
    elif facts.may_stay:
        _initial_state = ProcessState()
    seed_all(seed)
    previous = frameworks.loaded()
    try:
        yield
    finally:
        # If the client imported a framework, the original flags of the framework are unknown.
        has_new = any(next(new.settings(), None) for new in frameworks.loaded() if new not in previous)
        if has_new or (_initial_state is not None and not _initial_state.can_be_restored()):
            facts.has_to_leave = True


def seed_of(place: str) -> int:
    """Return the seed for one place in a run. The same text always gives the same seed."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4 * _SEED_WORDS).digest(), "little")


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and imported frameworks with a seed of :func:`seed_of`."""
    random.seed(seed)
    np.random.seed([seed >> 32 * word & 0xFFFFFFFF for word in range(_SEED_WORDS)])
    for framework in frameworks.loaded():
        framework.seed(seed)
