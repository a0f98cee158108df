"""What a worker does with a message: it loads the app, and has the process as the first client found it."""

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

_SEED_WORDS: Final = 8  # of 32 bits


@dataclass(frozen=True)
class AppReference:
    """A ClientApp that workers import."""

    folder: Path  # the app's folder, which goes first on ``sys.path``
    name: str  # ``"package.module:attribute"``

    def load(self) -> ClientApp:
        """Import it.

        Raises LoadClientAppError if that fails, or it is something else.
        """
        with missing_packages_named(self.folder):
            app = load_app(self.name, LoadClientAppError, self.folder)
        if not isinstance(app, ClientApp):
            raise LoadClientAppError(f"{self.name} is a {type(app).__name__}, not a ClientApp")
        return app


#: The event by which a worker says that the app handles several messages of this type at once.
TAKES_MANY: Final = "takes_many"
#: The event by which a worker that is there for one message says that the app's function begins, and that the
#: function has come to the first step of an optimizer: ``is_step`` tells these apart.
READY: Final = "ready"


def handle(
    app: AppReference | ClientApp,
    seeds: Sequence[int],
    slow_down: float,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    identity: Mapping[str, Any],
) -> list[message_call.Replied]:
    """Handle the messages of one assignment; runs in a worker. Return each reply and state.

    ``seeds``: one per message. The process is seeded for the first message. An app that handles several at
    once asks for the others by :func:`flower_gpu.message_seed`.
    ``slow_down``: how many times as long the app's function is to take, without imports. They are made for
    the first message of a worker, whichever client that is for.
    """
    loaded = load(app, seeds[0])
    for message, seed in zip(messages, seeds, strict=True):
        many.seed_message(message, seed)
    handler = many.find_handler(loaded, messages[0].metadata.message_type)
    if handler is not None:
        events.send(TAKES_MANY, max_messages=handler.max_messages)
    with as_first(seeds[0]):
        began_s = time.monotonic() - facts.import_s
        # In a context of its own, so that context variables are those of a new worker as well.
        folder = app.folder if isinstance(app, AppReference) else None
        with _ready_told(), missing_packages_named(folder):
            handled = copy_context().run(_replies, loaded, handler, messages, contexts, identity)
        took_s = time.monotonic() - facts.import_s - began_s
        if slow_down > 1:
            events.send("progress", desc="slow-down", n=0, total=1)  # top and the trace show it
        # With its lease: a slow device would be busy all that time.
        time.sleep((slow_down - 1) * max(0.0, took_s))
        return handled


@contextmanager
def _ready_told() -> Iterator[None]:
    """Tell in the block when a worker that is there for one message is ready to train."""
    if facts.may_stay:  # others have been ready for long
        yield
        return
    events.send(READY, is_step=False)
    with frameworks.at_first_step(lambda: events.send(READY, is_step=True)):
        yield


def handle_deterministically(
    app: AppReference | ClientApp, seeds: Sequence[int], *args: Any
) -> list[message_call.Replied]:
    """Handle a message by algorithms that give the same bits each time; others raise an error."""

    def prepare(framework: Framework, is_new: bool) -> None:
        framework.be_deterministic()
        if is_new:  # later workers find it loaded, and seeded
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
_found: ProcessState | None = None


def load(app: AppReference | ClientApp, seed: int) -> ClientApp:
    """Return an app, imported once in this process."""
    if isinstance(app, ClientApp):
        return app
    if app not in _loaded:
        seed_all(seed)  # what the app's modules draw when they are imported is the client's, too
        _loaded[app] = app.load()
    return _loaded[app]


@contextmanager
def as_first(seed: int) -> Iterator[None]:
    """Give a client, in the block, the state of this process that its first client found, and a seed."""
    global _found
    if _found is not None:
        count = os.environ.get(threads.VARIABLE, "")
        _found.restore()
        if count != os.environ.get(threads.VARIABLE, ""):  # a client's own number of cores
            os.environ[threads.VARIABLE] = count
            threads.apply()
    elif facts.may_stay:
        _found = ProcessState()
    seed_all(seed)
    had = frameworks.loaded()
    try:
        yield
    finally:
        # The flags of a framework that this client has imported are unknown as they were before.
        has_new = any(next(new.settings(), None) for new in frameworks.loaded() if new not in had)
        if has_new or (_found is not None and not _found.can_be_restored()):
            facts.has_to_leave = True


def seed_of(place: str) -> int:
    """Return the seed for one place in a run: each text has its own, and always the same one."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4 * _SEED_WORDS).digest(), "little")


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, numpy and imported frameworks by a seed of :func:`seed_of`."""
    random.seed(seed)
    np.random.seed([seed >> 32 * word & 0xFFFFFFFF for word in range(_SEED_WORDS)])
    for framework in frameworks.loaded():
        framework.seed(seed)
