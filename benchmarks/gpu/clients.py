"""GPU clients, as the benchmark sees them: many at once, with replies in any order."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.shared.processes import BenchmarkError, Member

Reply = dict[str, Any]
Request = dict[str, Any]

_LOOK_S = 0.02
#: A process with a CUDA context takes a moment to exit.
_EXIT_S = 15.0


class TimeLimitError(BenchmarkError):
    """The time of a part is over. Its earlier figures are valid."""


class Client(Member):
    """The process of one client; see ``client.py``."""

    def __init__(self, way: str, number: int) -> None:
        super().__init__(f"{way} client {number}", "gpu.client", way)
        self.way = way
        self.number = number
        self.is_busy = False

    def send(self, request: Mapping[str, Any]) -> None:
        super().send(request)
        self.is_busy = True

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def has_replied(self, timeout_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def receive(self) -> Reply:
        """Return the reply, after :meth:`has_replied`."""
        self.is_busy = False
        return self._reply(_EXIT_S)

    def wait_until_ready(self) -> Reply:
        self.is_busy = True
        reply = super().wait_until_ready()
        self.is_busy = False
        return reply

    def release(self) -> None:
        """Kill a client that is busy, and let an idle one exit."""
        if self.is_busy:
            self._process.kill()
        super().release()


@contextmanager
def clients(way: str, count: int) -> Iterator[list[Client]]:
    """Start clients at the same time, and end them at the same time."""
    started: list[Client] = []
    try:
        for number in range(count):
            started.append(Client(way, number))
        for client in started:
            client.wait_until_ready()
        yield started
    finally:
        for client in started:
            client.release()
        deadline = time.monotonic() + _EXIT_S
        for client in started:
            client.close(deadline - time.monotonic())


def check_deadline(deadline: float, text: str = "a client had not replied") -> None:
    """Raise TimeLimitError after the deadline."""
    if time.monotonic() > deadline:
        raise TimeLimitError(f"{text} when the time of this part was over")


def ask_all(
    work: Sequence[tuple[Client, Request]],
    deadline: float,
    *,
    concurrency: int | None = None,
    look: Callable[[], None] | None = None,
) -> list[Reply]:
    """Ask clients and return their replies in the order of ``work``.

    Parameters
    ----------
    work : sequence of (Client, request)
        One request per client.
    deadline : float
        Time on the clock of ``time.monotonic``, after which TimeLimitError is raised.
    concurrency : int, optional
        Maximum number of busy clients; default: all.
    look : callable, optional
        Called some 50 times a second while clients are busy.
    """
    pending = list(range(len(work)))
    replies: dict[int, Reply] = {}
    busy: dict[int, int] = {}
    poll = select.poll()
    while pending or busy:
        while pending and len(busy) < (concurrency or len(work)):
            number = pending.pop(0)
            client, request = work[number]
            client.send(request)
            busy[client.fileno()] = number
            poll.register(client, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * _LOOK_S if look else 1000):
            number = busy.pop(descriptor)
            poll.unregister(descriptor)
            replies[number] = work[number][0].receive()
        if look:
            look()
        if pending or busy:
            check_deadline(deadline, f"{len(replies)} of {len(work)} clients had replied")
    return [replies[number] for number in range(len(work))]


def ask(client: Client, request: Request, deadline: float, look: Callable[[], None] | None = None) -> Reply:
    """Ask one client."""
    return ask_all([(client, request)], deadline, look=look)[0]


def checked(reply: Reply, client: Client) -> Reply:
    """Return a reply, or raise BenchmarkError if it is an error."""
    if "error" in reply:
        raise BenchmarkError(f"{client.name}: {reply['error']}: {reply['message']}")
    return reply
