"""The driver's side of GPU clients: many at once, asked together, ended without waiting for each."""

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
_END_S = 15.0  # a process with a CUDA context takes a moment to end


class TimeLimitError(BenchmarkError):
    """The part's time is over; what was measured before counts."""


class Client(Member):
    """One client's process; see ``client.py``."""

    def __init__(self, way: str, number: int) -> None:
        super().__init__(f"{way} client {number}", "gpu.client", way)
        self.number = number
        self.is_busy = False

    def send(self, request: Mapping[str, Any]) -> None:
        super().send(request)
        self.is_busy = True

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def has_answered(self, timeout_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def receive(self) -> Reply:
        """Return the reply; it is there."""
        self.is_busy = False
        return self._reply(_END_S)

    def wait_until_ready(self) -> Reply:
        self.is_busy = True
        reply = super().wait_until_ready()
        self.is_busy = False
        return reply

    def let_go(self) -> None:
        """Have it end by itself; at once where nobody waits for its answer any more."""
        if self.is_busy:
            self._process.kill()
        super().let_go()


@contextmanager
def clients(way: str, count: int) -> Iterator[list[Client]]:
    """Start clients, all at the same time, and end them all."""
    started: list[Client] = []
    try:
        for number in range(count):
            started.append(Client(way, number))
        for client in started:
            client.wait_until_ready()
        yield started
    finally:
        for client in started:
            client.let_go()
        deadline = time.monotonic() + _END_S
        for client in started:
            client.close(deadline - time.monotonic())


def within(deadline: float, text: str = "a client had not answered") -> None:
    """Raise TimeLimitError after the deadline."""
    if time.monotonic() > deadline:
        raise TimeLimitError(f"{text} when the time of this part was over")


def ask_all(
    work: Sequence[tuple[Client, Request]],
    deadline: float,
    *,
    at_a_time: int | None = None,
    look: Callable[[], None] | None = None,
) -> list[Reply]:
    """Ask clients, at most so many at a time, and return their replies in the order of ``work``.

    Parameters
    ----------
    work : sequence of (Client, request)
        What is asked; each client once.
    deadline : float
        On the clock of ``time.monotonic``; then TimeLimitError.
    at_a_time : int, optional
        How many may be busy; default: all.
    look : callable, optional
        Called some 50 times a second meanwhile.
    """
    waiting = list(range(len(work)))
    replies: dict[int, Reply] = {}
    busy: dict[int, int] = {}
    poll = select.poll()
    while waiting or busy:
        while waiting and len(busy) < (at_a_time or len(work)):
            number = waiting.pop(0)
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
        if waiting or busy:
            within(deadline, f"{len(replies)} of {len(work)} clients had answered")
    return [replies[number] for number in range(len(work))]


def ask(client: Client, request: Request, deadline: float, look: Callable[[], None] | None = None) -> Reply:
    """Ask one client."""
    return ask_all([(client, request)], deadline, look=look)[0]


def checked(reply: Reply, client: Client) -> Reply:
    """Return a reply that is no failure. Raises BenchmarkError with what went wrong."""
    if "error" in reply:
        raise BenchmarkError(f"{client.name}: {reply['error']}: {reply['message']}")
    return reply
