"""Our ``flower-supernode``: Flower's, with shorter waits while there is work (drawing: commands.py).

Flower's SuperNode asks its SuperLink for a message every 3 s. Where a message is handled in less time, most
of a round would be waiting. And a SuperLink notices only after a minute that a SuperNode was killed; until
then the run waits for its reply.

Within a SuperNode nothing is asked again and again: its SuperExec is woken when a message is there
(superexec.py), and its own loop when the reply is.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from types import ModuleType
from typing import Any, Final

from flower_gpu.flower import node_slots as slots
from flower_gpu.flower.commands import CommandFolder
from flower_gpu.flower.wakeup import Waker, call_after
from flower_gpu.options import POLL_VARIABLE, value_of
from flower_gpu.workers.forkserver.control import Stays

_PART: Final = 0.05  # of the time it has waited already: so much later something may be noticed
_REPLY_S: Final = 0.05  # between two looks for the reply, which is in this process
_TASK: Final = (("flwr.supernode.nodestate.in_memory_nodestate", "InMemoryNodeState"), "create_task")
# What a part of a reply comes by.
_REPLY: Final = (
    (("flwr.supernode.nodestate.in_memory_nodestate", "InMemoryNodeState"), "store_message"),
    (("flwr.supercore.object_store.in_memory_object_store", "InMemoryObjectStore"), "put"),
)
_STAY_S: Final = 5.0  # between two looks whether the fork server is there
_HEARTBEAT: Final = "HEARTBEAT_DEFAULT_INTERVAL"  # as Flower calls it, in seconds
_LEAST_HEARTBEAT_S: Final = 10  # that a SuperLink of Flower's takes
_ASKING_S: Final = 1.0  # Flower waits longer only before it asks its SuperLink again


def main() -> None:
    """Run Flower's SuperNode."""
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli import flower_supernode

    least_s = value_of(POLL_VARIABLE, os.environ)
    if hasattr(start_client_internal, "time"):  # else it is another Flower, and keeps its own waits
        exchange = Exchange()
        look = _look_after(CommandFolder())
        start_client_internal.time = Clock(least_s, look, wait_for_reply=exchange.wait_for_reply())
    if is_on_this_host(sys.argv[1:]):  # over a network one may be out of reach for a while, and come back
        shorten_heartbeats(least_s, heartbeat, fleet_http_connection)
    sys.argv[0] = "flower-supernode"
    flower_supernode()


def is_on_this_host(arguments: Sequence[str]) -> bool:
    """Tell by the options of a ``flower-supernode`` whether its SuperLink is on this host."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--superlink", default="127.0.0.1:9092")  # Flower's default
    address: str = parser.parse_known_args(arguments)[0].superlink
    host = address.rpartition("//")[2].rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shorten_heartbeats(least_s: float, *modules: ModuleType) -> None:
    """Have a SuperLink notice sooner that this SuperNode was killed: a round waits for its reply until then.

    It notices after two intervals, of 30 s each in Flower. ``least_s`` is the shortest time between two
    questions to the SuperLink; it grows with the number of SuperNodes, and many keep Flower's own interval.
    ``modules`` are Flower's: one sends heartbeats, the other tells the SuperLink how often they come.
    """
    if all(hasattr(module, _HEARTBEAT) for module in modules):
        for module in modules:
            interval_s = min(getattr(module, _HEARTBEAT), max(_LEAST_HEARTBEAT_S, round(20 * least_s)))
            setattr(module, _HEARTBEAT, interval_s)


def _look_after(folder: CommandFolder) -> Callable[[], None]:
    """Return what is called again and again, so that the next message starts fast and with a lease."""
    stays = Stays()
    next_s = 0.0

    def look() -> None:
        nonlocal next_s
        folder.make()  # a host's tidying up may remove it, and Flower's own flwr-clientapp would be found
        if sys.platform == "linux" and time.monotonic() > next_s:
            slots.keep(os.environ)
            stays.ask_own()  # also with the successor of one that has ended
            next_s = time.monotonic() + _STAY_S

    return look


class Exchange:
    """What a SuperNode's loop and its other threads, which talk to SuperExec and ClientApp, tell each other.

    The loop creates the task of a message before it pulls what is in the message. So it wakes the SuperExec
    when it begins to wait for the reply: a ClientApp that asks too early for a part of it waits a second.
    """

    def __init__(self) -> None:
        self._waker = Waker()
        self._loop = threading.current_thread()
        self._task_is_new = False
        self._has_part = threading.Event()

    def wait_for_reply(self) -> Callable[[float], object] | None:
        """Return what waits for a part of the reply; None for a Flower in which that cannot be noticed."""
        if not all(call_after(*each, self._has_part.set) for each in _REPLY):
            return None
        if call_after(*_TASK, self._note_task):
            self._waker.announce()
        return self._wait

    def _note_task(self) -> None:
        if threading.current_thread() is self._loop:
            self._task_is_new = True
        else:  # an app wants a task of its own done
            self._waker.wake()

    def _wait(self, timeout_s: float) -> None:
        if self._task_is_new:
            self._task_is_new = False
            self._waker.wake()
        self._has_part.wait(timeout_s)
        self._has_part.clear()


class Clock:
    """The module ``time`` for a SuperNode's loop: its waits get longer the longer nothing happens.

    ``poll_s`` is the shortest wait between two questions to the SuperLink; the longest is Flower's own.
    ``before_waiting`` is called before each wait. ``wait_for_reply`` waits until a part of the reply is
    there, or as long as it is told; without it the reply is looked for again and again.
    """

    def __init__(
        self,
        poll_s: float,
        before_waiting: Callable[[], object] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        wait_for_reply: Callable[[float], object] | None = None,
    ) -> None:
        self._poll_s = poll_s
        self._before_waiting = before_waiting
        self._sleep = sleep
        self._monotonic = monotonic
        self._wait_for_reply = wait_for_reply
        self._is_asking = False
        self._since = monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait as long as Flower wants, or shorter."""
        self._before_waiting()
        now = self._monotonic()
        is_asking = seconds > _ASKING_S
        if is_asking != self._is_asking:
            self._is_asking, self._since = is_asking, now
        if self._wait_for_reply is not None and not is_asking:
            self._wait_for_reply(seconds)
            return
        least = self._poll_s if is_asking else _REPLY_S
        self._sleep(min(seconds, max(least, _PART * (now - self._since))))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
