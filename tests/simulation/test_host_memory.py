"""Workers begin while the host has memory for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from grid_handlers import until

from flower_gpu import control_group
from flower_gpu.errors import LeaseTimeoutError
from flower_gpu.simulation import host_memory
from flower_gpu.simulation.host_memory import HostMemory

GIB = 1 << 30


class Workers:
    """Threads with a worker each, on a host that a test says the memory of."""

    def __init__(self, free: float, total: float = 100) -> None:
        self.free, self._total = free, total
        self.memory = HostMemory(lambda: (int(self.free * GIB), int(self._total * GIB)))
        self._lock = threading.Lock()
        self.inside = 0
        self.entered: list[str] = []
        self.gave_way: list[str] = []
        self.errors: list[Exception] = []
        self._leave = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def start(self, count: int, *, has_lease: bool = False) -> None:
        for _ in range(count):
            options = {"has_lease": has_lease}
            self._threads.append(threading.Thread(target=self._work, kwargs=options, daemon=True))
            self._threads[-1].start()

    def leave(self, count: int = 1) -> None:
        self._leave.release(count)

    def end(self) -> None:
        self.free = self._total
        self._leave.release(1000)
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.inside == 0

    def start_alone(self, name: str = "the large one", **options: Any) -> None:
        options = {"name": name, "alone": True, **options}
        self._threads.append(threading.Thread(target=self._work, kwargs=options, daemon=True))
        self._threads[-1].start()

    def _work(self, *, name: str = "a small one", **options: Any) -> None:
        try:
            with self.memory.room(name, before_wait=lambda: self.gave_way.append(name), **options):
                with self._lock:
                    self.inside += 1
                    self.entered.append(name)
                self._leave.acquire()
                with self._lock:
                    self.inside -= 1
        except (KeyError, LeaseTimeoutError) as error:
            self.errors.append(error)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workers]]:
    monkeypatch.setattr(host_memory, "_POLL_S", 0.01)
    monkeypatch.setattr(host_memory, "_GROWTH_S", 3600.0)  # nobody has grown in the time of a test
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


def test_workers_with_leases_let_one_be_alone(workers: Callable[..., Workers]) -> None:
    """Their messages follow one another without a pause, and have no use for room as long as nobody waits."""
    some = workers(0)
    some.memory.learn(4 * GIB)
    some.start(3, has_lease=True)
    assert until(lambda: some.inside == 3)
    some.start_alone()
    assert until(lambda: some.memory.waits == 1)
    for _ in range(3):
        some.start(1, has_lease=True)
    assert until(lambda: some.memory.waits == 4)
    assert until(lambda: some.gave_way == ["the large one", *["a small one"] * 3])  # before they wait
    some.leave(3)
    assert until(lambda: some.entered[3:] == ["the large one"])
    some.start(1, has_lease=True)
    assert until(lambda: some.memory.waits == 5)
    assert some.inside == 1
    some.leave()
    assert until(lambda: some.inside == 1 and some.entered[-1] == "a small one")


def test_a_wait_ends_when_the_message_is_given_up(workers: Callable[..., Workers]) -> None:
    some = workers(50)
    some.start(1)
    assert until(lambda: some.inside == 1)
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise KeyError

    some.start_alone(check=check)
    assert until(lambda: some.memory.waits == 1)
    given_up.set()
    some.memory.wake()
    assert until(lambda: len(some.errors) == 1)
    assert some.inside == 1
    some.start(1)  # nobody waits to be alone any more
    assert until(lambda: some.inside == 2)


def test_two_are_alone_one_after_the_other_and_say_what_they_wait_for(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    some = workers(50)
    some.start(2)
    assert until(lambda: some.inside == 2)
    for count, name in enumerate(["first", "second"], 1):
        some.start_alone(name)
        assert until(lambda count=count: some.memory.waits == len(caplog.messages) == count)
    assert caplog.messages == [
        f"{name} waits to be handled alone: a small one and 1 other are still in flight"
        for name in ("first", "second")
    ]
    some.start_alone("third", timeout_s=0.05)
    assert until(lambda: len(some.errors) == 1)
    assert "third could not be handled alone within lease_timeout_s=0.05: a small one and" in str(
        some.errors[0]
    )
    some.leave(2)
    assert until(lambda: some.entered[2:] == ["first"])
    some.leave()
    assert until(lambda: some.entered[2:] == ["first", "second"])
    assert some.inside == 1


def test_this_host_tells() -> None:
    found = control_group.available_memory()
    available, total = found
    assert 0 <= available <= total
    assert total > 1 << 26
