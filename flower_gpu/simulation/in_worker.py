"""What a worker does with a message: it loads the app, and has the process as the first client found it."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.supercore.object_ref import load_app

from flower_gpu import frameworks
from flower_gpu.flower import many, message_call
from flower_gpu.frameworks.framework import Framework, Setting
from flower_gpu.workers import events, threads
from flower_gpu.workers.own_process import facts

_SEED_WORDS: Final = 8  # of 32 bits

_SIGNALS: Final = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class AppReference:
    """A ClientApp that workers import."""

    folder: Path  # the app's folder, which goes first on ``sys.path``
    name: str  # ``"package.module:attribute"``

    def load(self) -> ClientApp:
        """Import it.

        Raises LoadClientAppError if that fails, or it is something else.
        """
        app = load_app(self.name, LoadClientAppError, self.folder)
        if not isinstance(app, ClientApp):
            raise LoadClientAppError(f"{self.name} is a {type(app).__name__}, not a ClientApp")
        return app


#: The event by which a worker says that the app handles several messages of this type at once.
TAKES_MANY: Final = "takes_many"


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
        if handler is not None and len(messages) > 1:
            handled = many.run_many(handler, messages, contexts, identity)
        else:
            pairs = zip(messages, contexts, strict=True)
            handled = [message_call.replied(loaded, *pair, identity) for pair in pairs]
        took_s = time.monotonic() - facts.import_s - began_s
        if slow_down > 1:
            events.send("progress", desc="slow-down", n=0, total=1)  # top and the trace show it
        # With its lease: a slow device would be busy all that time.
        time.sleep((slow_down - 1) * max(0.0, took_s))
        return handled


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
        if any(next(new.settings(), None) for new in frameworks.loaded() if new not in had):
            facts.has_to_leave = True  # nobody knows what flags it had before this client


class ProcessState:
    """The state of a process that each call finds anew: environment, folder, flags of Python and frameworks.

    Modules and what is in their globals stay as they are.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Setting, Any]] = []
        of_frameworks = (framework.settings() for framework in frameworks.loaded())
        for setting in chain(_of_process(), *of_frameworks):
            # What torch has two names for cannot be read by one when it was set by the other.
            with suppress(RuntimeError, AttributeError, TypeError):
                self._found.append((setting, setting.get()))

    def restore(self) -> None:
        """Give this process the state again that it had."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for setting, value in self._found:
            try:  # not suppress(), which would take as long as all else here
                if setting.get() == value:
                    continue
            except (RuntimeError, AttributeError):
                pass
            setting.set(value)


def seed_of(place: str) -> int:
    """Return the seed for one place in a run: each text has its own, and always the same one."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4 * _SEED_WORDS).digest(), "little")


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, numpy and imported frameworks by a seed of :func:`seed_of`."""
    random.seed(seed)
    np.random.seed([seed >> 32 * word & 0xFFFFFFFF for word in range(_SEED_WORDS)])
    for framework in frameworks.loaded():
        framework.seed(seed)


def _of_process() -> Iterator[Setting]:
    # What os.environ keeps: to decode all of it takes longer than all else here.
    variables = getattr(os.environb, "_data", os.environb)
    yield Setting(lambda: dict(variables), _set_environ)
    yield Setting(os.getcwd, os.chdir)
    yield Setting(lambda: dict(np.geterr()), lambda value: np.seterr(**value))
    yield Setting(lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value))
    yield Setting(lambda: (sys.stdout, sys.stderr), _set_streams)
    filters: Any = warnings.filters
    yield Setting(lambda: list(filters), lambda value: filters.__setitem__(slice(None), value))
    yield Setting(gc.isenabled, lambda value: gc.enable() if value else gc.disable())
    yield Setting(sys.getrecursionlimit, sys.setrecursionlimit)
    yield Setting(_umask, os.umask)
    yield Setting(lambda: logging.root.manager.disable, logging.disable)
    yield Setting(lambda: logging.root.level, logging.root.setLevel)
    if hasattr(os, "sched_getaffinity"):
        yield Setting(lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value))
    yield Setting(
        lambda: {number: signal.getsignal(number) for number in _SIGNALS},
        lambda value: [signal.signal(number, handler) for number, handler in value.items()],
    )


def _set_environ(value: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - value.keys():
        del os.environb[name]
    os.environb.update(value)


def _set_streams(value: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = value


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value
