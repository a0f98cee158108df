"""Workers begin while the host has memory for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from grid_handlers import until

from flower_gpu import control_group
from flower_gpu.simulation import messages
from flower_gpu.simulation.messages import HostMemory

pytestmark = pytest.mark.timeout(60)

GIB = 1 << 30


class Workers:
    """Threads with a worker each, on a host that a test says the memory of."""

    def __init__(self, free: float, total: float = 100) -> None:
        self.free, self._total = free, total
        self.memory = HostMemory(lambda: (int(self.free * GIB), int(self._total * GIB)))
        self._lock = threading.Lock()
        self.inside = 0
        self._leave = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()

    def leave(self, count: int = 1) -> None:
        self._leave.release(count)

    def end(self) -> None:
        self.free = self._total
        self._leave.release(1000)
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.inside == 0

    def start_alone(self) -> None:
        self._threads.append(threading.Thread(target=self._work, kwargs={"alone": True}, daemon=True))
        self._threads[-1].start()

    def _work(self, *, alone: bool = False) -> None:
        with self.memory.room(alone=alone):
            with self._lock:
                self.inside += 1
            self._leave.acquire()
            with self._lock:
                self.inside -= 1


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workers]]:
    monkeypatch.setattr(messages, "_POLL_S", 0.01)
    monkeypatch.setattr(messages, "_GROWTH_S", 3600.0)  # nobody has grown in the time of a test
    made: list[Workers] = []

    def new(free: float) -> Workers:
        made.append(Workers(free))
        return made[-1]

    yield new
    for one in made:
        one.end()


def test_the_first_one_always_has_room(workers: Callable[..., Workers]) -> None:
    some = workers(0)
    some.memory.learn(4 * GIB)
    some.start(3)
    assert until(lambda: some.memory.waits == 2)
    assert some.inside == 1
    some.leave()
    assert until(lambda: some.memory.waits == 2 and some.inside == 1)  # the next one is alone as well


def test_others_on_the_host_give_memory_back(workers: Callable[..., Workers]) -> None:
    some = workers(0)
    some.memory.learn(4 * GIB)
    some.start(2)
    assert until(lambda: some.inside == 1 and some.memory.waits == 1)
    some.free = 50
    assert until(lambda: some.inside == 2)


def test_those_that_come_at_once_do_not_all_see_the_same_room(workers: Callable[..., Workers]) -> None:
    """20 GiB are free, 5 stay free: three workers of 4 GiB."""
    some = workers(20)
    some.memory.learn(4 * GIB)
    some.start(8)
    assert until(lambda: some.memory.waits == 5)
    assert some.inside == 3


def test_those_that_are_gone_take_no_room(workers: Callable[..., Workers]) -> None:
    """Many short calls, one after the other: none has to wait for what has ended."""
    some = workers(20)
    some.memory.learn(4 * GIB)
    some.start(1)
    for _ in range(20):
        some.start(1)
        assert until(lambda: some.inside == 2)
        some.leave()
        assert until(lambda: some.inside == 1)
    assert some.memory.waits == 0


def test_an_error_gives_the_room_back(workers: Callable[..., Workers]) -> None:
    some = workers(0)
    some.memory.learn(4 * GIB)
    with pytest.raises(KeyError), some.memory.room():
        raise KeyError
    some.start(1)
    assert until(lambda: some.inside == 1)


def test_one_that_is_alone_waits_for_all_others_and_lets_none_in(workers: Callable[..., Workers]) -> None:
    some = workers(50)
    some.start(2)
    assert until(lambda: some.inside == 2)
    some.start_alone()
    assert until(lambda: some.memory.waits == 1)
    some.start(1)
    assert until(lambda: some.memory.waits == 2)
    some.leave(2)
    assert until(lambda: some.inside == 1)
    some.start(1)
    assert until(lambda: some.memory.waits == 3)
    assert some.inside == 1
    some.leave()
    assert until(lambda: some.inside == 2)


def test_this_host_tells() -> None:
    found = control_group.available_memory()
    available, total = found
    assert 0 <= available <= total
    assert total > 1 << 26
