"""A batch: messages that one worker handles together, up to a vectorized function and from there on.

Each message has a thread, and only one of all threads runs at a time. It stops where its handler calls a
vectorized function. When all have come so far, or are done, the main thread calls the function once for all
that have called it alike, and each goes on with its own result::

    message 1 ── handler ──┐                      ┌── handler ──> reply
    message 2 ──── handler ┼─> run_together, once ┼──── handler ──> reply
    message 3 ── error     └──────────────────────┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from flower_gpu.flower import message_call
from flower_gpu.flower.records import records_in
from flower_gpu.flower.rounds import capture_random_state, restore_random_state
from flower_gpu.frameworks.framework import Setting
from flower_gpu.frameworks.out_of_memory import out_of_memory_in
from flower_gpu.pytorch.vectorized import FunctionCall, answer, meeting
from flower_gpu.simulation import in_worker
from flower_gpu.workers.call_end import Outcome, failure
from flower_gpu.workers.own_process import facts


def handle_batch(
    app: in_worker.AppReference | ClientApp,
    visits: Sequence[tuple[int, Message, Context]],
    identity: Mapping[str, Any],
) -> list[Outcome]:
    """Handle messages, given with their seeds; runs in a worker.

    Returns a reply and a state, or an error, of each.
    Raises what says that a GPU has no memory left: with more of it the batch is handled again.
    """
    seed, *_ = visits[0]
    loaded = in_worker.load(app, seed)
    with in_worker.as_first(seed):
        found = in_worker.ProcessState()
        threads = [
            _MessageThread(
                own_seed, partial(message_call.run, loaded, _own(message), context, identity), found
            )
            for own_seed, message, context in visits
        ]
        waiting = threads
        while waiting:
            for thread in waiting:
                thread.go_on()
            waiting = [thread for thread in waiting if thread.call is not None]
            answer([thread.call for thread in waiting if thread.call is not None])
    for thread in threads:
        if thread.error is not None:
            facts.has_to_leave = True  # as after any error
            if out_of_memory_in(thread.error) is not None:
                raise thread.error
    return [thread.outcome for thread in threads]


class _MessageThread(threading.Thread):
    """Handles one message, while the main thread waits for it.

    ``found``: the state of the process that each client finds.
    ``call``: what the thread waits for itself.
    ``outcome``: of the message; if it has failed, ``error`` is why.
    """

    def __init__(
        self, seed: int, handle: Callable[[], message_call.Handled], found: in_worker.ProcessState
    ) -> None:
        super().__init__(name="flower-gpu-message", daemon=True)
        self._seed = seed
        self._handle = handle
        self._found = found
        self._may_go_on, self._has_stopped = threading.Lock(), threading.Lock()
        self._may_go_on.acquire()
        self._has_stopped.acquire()
        self._changes: Sequence[tuple[Setting, Any]] = ()  # of the process's state, by this client
        self._drawn: dict[str, Any] = {}  # the state of random numbers
        self.call: FunctionCall | None = None
        self.error: BaseException | None = None
        self.outcome = Outcome()

    def go_on(self) -> None:
        """Let it run until it waits for a call, or is done; then leave the process as all find it."""
        if self.ident is None:
            in_worker.seed_all(self._seed)
            self.start()
        else:
            restore_random_state(self._drawn)
            for setting, value in self._changes:
                setting.set(value)
            self._may_go_on.release()
        self._has_stopped.acquire()
        self._changes = self._found.restore()
        if self.call is not None:
            self._drawn = capture_random_state()

    def run(self) -> None:
        """Handle the message."""
        try:
            with meeting(self._meet):
                self.outcome = Outcome(self._handle())
        except BaseException as error:  # a SystemExit is the client's, not this process's
            self.error, self.outcome = error, failure(error)
        self._has_stopped.release()

    def _meet(self, call: FunctionCall) -> Any:
        """Wait for the result of a call, while others run."""
        self.call = call
        self._has_stopped.release()
        self._may_go_on.acquire()
        self.call = None
        return call.result()


def _own(message: Message) -> Message:
    """Return a message with records of its own: a round has the same, and handlers change them."""
    own = copy(message)
    if message.has_content():
        records = records_in(message, ArrayRecord).values()
        kept = {id(array): array for record in records for array in record.values()}  # never changed
        own.content = deepcopy(message.content, kept)
    return own
