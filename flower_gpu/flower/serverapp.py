"""What runs in place of Flower's ``flwr-serverapp``: that, with rounds and replies in the trace of the run.

An app need not know of it: its ServerApp gets Flower's own grid, of which two methods note what goes through.
Flower's looks for replies every 3 s; this one when it is told (waits/reply_waits.py).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, Final

from flwr.app import Message
from flwr.serverapp import Grid, ServerApp

from flower_gpu.flower.objects import ask_for_many
from flower_gpu.flower.private_names import HTTP_GRID, find
from flower_gpu.flower.recording.recorded_grid import RecordedGrid
from flower_gpu.flower.recording.recorder import Recorder, write_event
from flower_gpu.flower.recording.strategies import recorded_rounds
from flower_gpu.flower.waits.reply_waits import GridTime
from flower_gpu.flower.waits.wakeup import group_of

_NAME: Final = "flwr-serverapp"


def main() -> None:
    """Run Flower's command."""
    (command,) = entry_points(group="console_scripts", name=_NAME)
    clock = GridTime(group_of(os.environ))
    if find(f"{HTTP_GRID}:time") is not None:  # else it is another Flower, and keeps its own waits
        sys.modules[HTTP_GRID].time = clock  # type: ignore[attr-defined]
    ask_for_many()
    ServerApp.__call__ = _recorded(ServerApp.__call__, clock)  # type: ignore[method-assign]
    sys.argv[0] = _NAME
    command.load()()


def _recorded(call: Callable[..., None], clock: GridTime) -> Callable[..., None]:
    @functools.wraps(call)
    def recorded(app: ServerApp, grid: Grid, context: Any) -> None:
        with recorded_rounds(write_event) as recorder:
            record(grid, recorder, clock)
            call(app, grid, context)

    return recorded


def record(grid: Grid, recorder: Recorder, clock: GridTime) -> None:
    """Note from now on what is sent through a grid of Flower's, also for the clock by which it waits.

    Its own ``send_and_receive`` pushes messages and pulls replies by the two methods that are replaced, so
    each reply is noted when it comes.
    """
    push, send_and_receive = grid.push_messages, grid.send_and_receive
    recorded = RecordedGrid(
        SimpleNamespace(
            # Flower's goes through them more than once.
            push_messages=lambda messages: push(list(messages)),
            pull_messages=grid.pull_messages,
        ),
        recorder,
    )
    of_thread = threading.local()

    def push_messages(messages: Iterable[Message]) -> Iterable[str]:
        ids = recorded.push_messages(messages)
        of_thread.ids = ids
        clock.sent()
        return ids

    def pull_messages(message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(recorded.pull_messages(message_ids))
        if replies:
            clock.received()
        return replies

    def send_and_wait(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        of_thread.ids = []
        replies = send_and_receive(messages, timeout=timeout)
        recorded.give_up(of_thread.ids, "no reply" if timeout is None else f"no reply within {timeout:g} s")
        return replies

    replaced = {
        "push_messages": push_messages,
        "pull_messages": pull_messages,
        "send_and_receive": send_and_wait,
    }
    for name, method in replaced.items():
        setattr(grid, name, method)
