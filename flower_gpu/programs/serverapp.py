"""Our ``flwr-serverapp``: Flower's own, with rounds and replies in the trace of the run.

Apps need no change. A ServerApp gets Flower's own grid, with two methods replaced to record messages and
replies. Flower's grid polls for replies every 3 s. This one polls when a SuperNode reports a reply.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from flwr.app import Message
from flwr.serverapp import Grid, ServerApp

from flower_gpu import standard_streams
from flower_gpu.apps.app_exit import describe_exit, is_asked_by_flower
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.flower.private_names import HTTP_GRID, SERVER_RUNTIME, find
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.programs import environments, waits
from flower_gpu.programs.client_order import ClientOrder
from flower_gpu.programs.commands import flowers
from flower_gpu.programs.objects import ask_for_many
from flower_gpu.strategies.model_file import write_model
from flower_gpu.strategies.recording.recorded_grid import RecordedGrid
from flower_gpu.strategies.recording.recorder import Recorder, write_event
from flower_gpu.strategies.recording.strategies import recorded_rounds
from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.resuming.kept_rounds import KeptRounds
from flower_gpu.strategies.resuming.states import StateStore
from flower_gpu.strategies.rounds import keep_generator

_NAME: Final = "flwr-serverapp"
# Shortest polling interval if SuperNodes do not report replies
_LEAST_S: Final = 0.1
# Shortest polling interval otherwise. Then polling only finds errors of the SuperLink itself.
_TOLD_LEAST_S: Final = 0.5
#: Maximum number of polls per second of all threads, if many replies are reported.
_QUESTIONS_PER_S: Final = 40.0
_FOREVER_S: Final = 3600.0


def main() -> None:
    """Run Flower's command."""
    standard_streams.open_missing()
    command = EntryPoint(_NAME, flowers()[_NAME], "console_scripts")
    clock = GridTime(waits.group_of(os.environ))
    if find(f"{HTTP_GRID}:time") is not None:  # else it is another Flower, and keeps its own waits
        sys.modules[HTTP_GRID].time = clock  # type: ignore[attr-defined]
    ask_for_many()
    keep_generator()
    environments.replace_installation(SERVER_RUNTIME)
    report_exits()
    ServerApp.__call__ = _recorded(ServerApp.__call__, clock)  # type: ignore[method-assign]
    sys.argv[0] = _NAME
    command.load()()


def report_exits() -> None:
    """Let a ServerApp fail at once if it exits, also during its import.

    Flower reports only exceptions, and not an app that calls ``sys.exit``. The SuperLink would wait a minute
    for a heartbeat, and the output of the app would be lost.
    """
    known = find(f"{SERVER_RUNTIME}:run_")
    if known is None:
        return

    @functools.wraps(known)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return known(*args, **kwargs)
        except SystemExit as error:
            if is_asked_by_flower(error):
                raise
            # Without the traceback of the exit, the last lines of the log have what the app wrote before it.
            raise ConfigError(describe_exit(error, "ServerApp")) from None

    vars(sys.modules[SERVER_RUNTIME])["run_"] = run


def _recorded(call: Callable[..., None], clock: GridTime) -> Callable[..., None]:
    @functools.wraps(call)
    def recorded(app: ServerApp, grid: Grid, context: Any) -> None:
        path = os.environ.get(RUN_DIR_VARIABLE)
        folder = None if path is None else RunFolder(Path(path))
        with recorded_rounds(write_event) as recorder:
            record(grid, recorder, clock)
            if folder is None:
                call(app, grid, context)
                return
            keep_rounds(grid, recorder, folder)
            with _final_model(recorder, folder):
                call(app, grid, context)

    return recorded


@contextmanager
def _final_model(recorder: Recorder, folder: RunFolder) -> Iterator[None]:
    """Write the last global model into the run's folder, unless the app writes the file itself.

    Raises FlowerGPUError if the disk is full or cannot be written to, and the app has not failed before.
    """
    previous = _written_at(folder.model)
    try:
        yield
    except BaseException:
        with suppress(FlowerGPUError):
            _write_model(recorder, folder, previous)
        raise
    _write_model(recorder, folder, previous)


def _write_model(recorder: Recorder, folder: RunFolder, written_at: int | None) -> None:
    if _written_at(folder.model) == written_at:
        write_model(recorder.model, folder)


def _written_at(path: Path) -> int | None:
    """Return the time of the last change of a file in nanoseconds, or None without a file."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def record(grid: Grid, recorder: Recorder, clock: GridTime) -> None:
    """Record the messages and replies of Flower's grid from now on, and tell the clock of its waits.

    The grid's ``send_and_receive`` calls the two replaced methods to push messages and pull replies. So each
    reply is recorded when it arrives.
    """
    push, send_and_receive = grid.push_messages, grid.send_and_receive
    recorded = RecordedGrid(
        SimpleNamespace(
            # A list, because Flower's method iterates over the messages more than once.
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

    def pull_messages(*wanted: Iterable[str] | None, **named: Iterable[str] | None) -> Iterable[Message]:
        replies = list(recorded.pull_messages(*wanted, **named))
        if replies:
            clock.received()
        return replies

    def send_and_wait(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        of_thread.ids = []
        replies = send_and_receive(messages, timeout=timeout)
        recorded.abandon(of_thread.ids, "no reply" if timeout is None else f"no reply within {timeout:g} s")
        return replies

    def wait_for_replies(message_ids: Sequence[str], timeout_s: float) -> Sequence[str]:
        if timeout_s:  # the clock decides when to poll
            clock.sleep(waits.LONGEST_S)
        return message_ids

    replaced = {
        "wait_for_replies": wait_for_replies,
        "taken": recorded.taken,
        "push_messages": push_messages,
        "pull_messages": pull_messages,
        "send_and_receive": send_and_wait,
    }
    for name, method in replaced.items():
        setattr(grid, name, method)


def keep_rounds(grid: Grid, recorder: Recorder, folder: RunFolder) -> None:
    """Make a grid of Flower's a :class:`.ResumableGrid`, with the checkpoints in a run's folder.

    Nodes and replies have the order of the clients: sums, and which clients a seed chooses, do not depend on
    chance.
    """
    in_order: Any = grid
    get_nodes, send_and_receive, order = grid.get_nodes, grid.send_and_receive, ClientOrder(folder)
    in_order.get_nodes = lambda: order.nodes(get_nodes())
    in_order.send_and_receive = lambda *args, **kwargs: order.replies(send_and_receive(*args, **kwargs))
    checkpoints = Checkpoints(folder.checkpoint, StateStore())
    KeptRounds(checkpoints, checkpoints.read(), recorder).on(grid)


class GridTime:
    """The module ``time`` for Flower's grid, of which several threads may wait.

    ``group`` are the SuperNodes that tell of their replies.
    """

    def __init__(self, group: waits.NodeGroup | None = None) -> None:
        self._wake_ups = group.lead() if group is not None else None
        self._group = group
        self._changed = threading.Condition()
        self._reply_count = 0  # number of reports of a reply
        self._waiting = 0  # threads
        self._of_thread = threading.local()
        if self._wake_ups is not None:
            threading.Thread(target=self._listen, args=(self._wake_ups,), daemon=True).start()

    def sent(self) -> None:
        """Note that this thread has sent messages, and will wait for replies."""
        if self._group is not None:
            self._group.wake_nodes()
        self._of_thread.seen_replies = self._reply_count
        self.received()

    def received(self) -> None:
        """Note that this thread has got a reply."""
        self._of_thread.since = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait until there may be a reply, but not longer than Flower wants."""
        of_thread = self._of_thread
        now = time.monotonic()
        since = of_thread.__dict__.setdefault("since", now)
        least_s = _LEAST_S if self._wake_ups is None else _TOLD_LEAST_S
        with self._changed:
            self._waiting += 1
            longest_s = min(seconds, waits.wait_s(now - since, least_s))
            seen = of_thread.__dict__.setdefault("seen_replies", self._reply_count)
            self._changed.wait_for(lambda: self._reply_count != seen, longest_s)
            self._waiting -= 1
            shortest_s = min(longest_s, (self._waiting + 1) / _QUESTIONS_PER_S)
        # Replies come together: one question for several, and no thread asks for each of the others'.
        time.sleep(max(0.0, now + shortest_s - time.monotonic()))
        of_thread.seen_replies = self._reply_count

    def _listen(self, wake_ups: Any) -> None:
        while True:
            if wake_ups.wait(_FOREVER_S):
                wake_ups.clear()
                with self._changed:
                    self._reply_count += 1
                    self._changed.notify_all()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
