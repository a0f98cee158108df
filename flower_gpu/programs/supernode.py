"""Our ``flower-supernode``: Flower's SuperNode with shorter waits while there is work (see commands.py).

Flower's SuperNode polls its SuperLink for a message every 3 s. If a message is handled in less time, most of
a round would be waiting. A SuperLink also notices only after a minute that a SuperNode was killed, and until
then the run waits for its reply.

Within a SuperNode no process polls another: the SuperExec is woken when a message has arrived (superexec.py),
and the SuperNode's loop is woken when the reply has arrived.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from flower_gpu import standard_streams
from flower_gpu.flower.private_names import HEARTBEAT_INTERVALS, NODE_LOOP, NODE_STATE, OBJECT_STORE, find
from flower_gpu.options import IDLE_POLL, POLL
from flower_gpu.programs import objects, superlink, waits
from flower_gpu.programs.commands import CommandFolder
from flower_gpu.programs.server import fork_own
from flower_gpu.programs.waits import NodeGroup, Waker, call_after, group_of
from flower_gpu.workers.forkserver.control import Stays

# Methods that store a part of a reply.
_REPLY: Final = ((NODE_STATE, "store_message"), (OBJECT_STORE, "put"))
# Modules that are imported by the programs that Flower starts below a SuperNode.
_IMPORTED_BELOW: Final = (
    "flower_gpu.programs.superexec",
    "flower_gpu.programs.clientapp",
    "flower_gpu.programs.flwr_clientapp",
    "flwr.supercore.cli",
    "httpcore",
    "pynvml",
)
_STAY_S: Final = 5.0  # interval between checks of the fork server
# A SuperLink notices a killed SuperNode after two intervals. Flower sends every 30 s, and takes 10 s or more.
_HEARTBEAT_S: Final = 10
_ASKING_S: Final = 1.0  # Flower waits longer only before it asks its SuperLink again
_SPREAD: Final = (0.1, 1.9)  # of a wait: SuperNodes that wake each other ask one after the other


def main() -> None:
    """Run Flower's SuperNode."""
    standard_streams.open_missing()
    from flwr.supernode.cli import flower_supernode

    fork_own(_IMPORTED_BELOW)
    least_s = POLL.resolve(None, os.environ)
    if find(f"{NODE_LOOP}:time") is not None:  # else it is another Flower, and keeps its own waits
        # Over a network the SuperLink may be out of reach for a while, and come back.
        if superlink.is_on_this_host(superlink.address_of(sys.argv[1:])):
            send_heartbeats_often()
        idle_s = IDLE_POLL.resolve(None, os.environ)
        clock = SuperNodeTime(least_s, idle_s, group_of(os.environ), _look_after(CommandFolder()))
        clock.listen()
        sys.modules[NODE_LOOP].time = clock  # type: ignore[attr-defined]
        objects.ask_for_many()
        objects.answer_for_many(objects.SUPERNODE)
    sys.argv[0] = "flower-supernode"
    flower_supernode()


def send_heartbeats_often() -> None:
    """Have the SuperLink notice soon when this process was killed."""
    for name in HEARTBEAT_INTERVALS:  # one module sends them, the other tells the SuperLink how often
        if find(name) is not None:
            module, _, interval = name.partition(":")
            setattr(sys.modules[module], interval, _HEARTBEAT_S)


def _look_after(folder: CommandFolder) -> Callable[[], None]:
    """Return a function to be called regularly: it keeps the fork server ready for the next message."""
    stays = Stays()
    next_s = 0.0

    def look() -> None:
        nonlocal next_s
        folder.make()  # a host's tidying up may remove it, and Flower's own flwr-clientapp would be found
        if sys.platform == "linux" and time.monotonic() > next_s:
            stays.ask_own()  # repeated, because a fork server that has ended gets a successor
            next_s = time.monotonic() + _STAY_S

    return look


class SuperNodeTime:
    """The module ``time`` for a SuperNode's loop: its waits, and its wake-ups of others.

    The loop asks its SuperLink for a message, makes a task of the message, pulls its content, waits for the
    reply, and sends the reply. The SuperExec is woken when the wait begins. If it were woken earlier, its
    ClientApp might ask too early for a part of the message, and would wait.

    ``least_s``: shortest wait between two polls of the SuperLink.
    ``idle_s``: wait between two polls without work.
    ``group``: the SuperNodes of the same command.
    ``before_waiting``: called before each wait.
    ``monotonic``: as in ``time``.
    """

    def __init__(
        self,
        least_s: float,
        idle_s: float,
        group: NodeGroup | None = None,
        before_waiting: Callable[[], object] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least_s, self._idle_s = least_s, idle_s
        self._group = group
        self._wake_ups = group.join() if group is not None else None
        self._before_waiting = before_waiting
        self._monotonic = monotonic
        self._since: float | None = None  # when it began to ask for this message
        self._was_woken = False
        self._superexec = Waker()
        self._task_is_new = False
        self._has_part = threading.Event()
        self._is_told_of_parts = False
        self._thread = threading.current_thread()

    def listen(self) -> None:
        """Have Flower's code in this process report its steps, where this version of Flower allows it."""
        if self._group is not None:
            call_after(NODE_STATE, "delete_messages", self._group.wake_server)  # the reply has been sent
        is_told = call_after(NODE_STATE, "create_task", self._note_task)
        if is_told and all(call_after(*target, self._has_part.set) for target in _REPLY):
            self._is_told_of_parts = True
            self._superexec.announce()

    def _note_task(self) -> None:
        if threading.current_thread() is not self._thread:  # an app wants a task of its own done
            self._superexec.wake()
            return
        self._task_is_new = True
        if self._group is not None and not self._was_woken:
            self._group.wake_nodes()

    def sleep(self, seconds: float) -> None:
        """Wait for the event that Flower's code polls at this interval."""
        self._before_waiting()
        if seconds > _ASKING_S:
            self._wait_for_message()
        else:
            self._wait_for_reply(seconds)

    def _wait_for_message(self) -> None:
        """Wait until it is time to ask for a message."""
        now = self._monotonic()
        if self._since is None:
            self._since = now
        seconds = waits.wait_s(now - self._since, self._least_s, self._idle_s)
        if self._wake_ups is None:
            time.sleep(seconds)
            return
        self._was_woken = self._wake_ups.wait(seconds * random.uniform(*_SPREAD))
        if self._was_woken:
            self._wake_ups.clear()
            # It may be that only others have a message. There is a run, so the next one may be for this node.
            self._since = max(self._since, self._monotonic() - waits.TOLD_S)

    def _wait_for_reply(self, longest_s: float) -> None:
        """Wait until a part of the reply is there, or this time is over."""
        self._since = None
        if self._task_is_new:
            self._task_is_new = False
            self._superexec.wake()
        if self._is_told_of_parts:
            self._has_part.wait(longest_s)
            self._has_part.clear()
        else:
            time.sleep(longest_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
