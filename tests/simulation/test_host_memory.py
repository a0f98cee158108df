"""Workers start only while the host has enough free memory for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import until

from flower_gpu import control_group
from flower_gpu.errors import LeaseTimeoutError
from flower_gpu.simulation import host_memory
from flower_gpu.simulation.host_memory import HostMemory

GIB = 1 << 30


class Workers:
    """Threads that each run one worker, on a host whose free memory the test sets."""

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
    # No worker is old enough to have grown during a test.
    monkeypatch.setattr(host_memory, "_GROWTH_S", 3600.0)
    all_workers: list[Workers] = []

    def start_workers(free: float) -> Workers:
        all_workers.append(Workers(free))
        return all_workers[-1]

    yield start_workers
    for started_workers in all_workers:
        started_workers.end()


def test_the_first_worker_always_has_room(workers: Callable[..., Workers]) -> None:
    started = workers(0)
    started.memory.learn(4 * GIB)
    started.start(3)
    until(lambda: started.memory.wait_count == 2)
    assert started.inside == 1
    started.leave()
    # The next worker is alone as well.
    until(lambda: started.memory.wait_count == 2 and started.inside == 1)


def test_others_on_the_host_give_memory_back(workers: Callable[..., Workers]) -> None:
    started = workers(0)
    started.memory.learn(4 * GIB)
    started.start(2)
    until(lambda: started.inside == 1 and started.memory.wait_count == 1)
    started.free = 50
    until(lambda: started.inside == 2)


def test_simultaneous_workers_do_not_claim_the_same_free_memory(workers: Callable[..., Workers]) -> None:
    """With 20 GiB free and 5 GiB kept free, three workers of 4 GiB fit."""
    started = workers(20)
    started.memory.learn(4 * GIB)
    started.start(8)
    until(lambda: started.memory.wait_count == 5)
    assert started.inside == 3


def test_ended_workers_take_no_room(workers: Callable[..., Workers]) -> None:
    """Many short calls follow one another, and no call waits for the memory of ended workers."""
    started = workers(20)
    started.memory.learn(4 * GIB)
    started.start(1)
    for _ in range(20):
        started.start(1)
        until(lambda: started.inside == 2)
        started.leave()
        until(lambda: started.inside == 1)
    assert started.memory.wait_count == 0


def test_an_error_releases_the_room(workers: Callable[..., Workers]) -> None:
    started = workers(0)
    started.memory.learn(4 * GIB)
    with pytest.raises(KeyError), started.memory.room():
        raise KeyError
    started.start(1)
    until(lambda: started.inside == 1)


def test_a_worker_that_runs_alone_waits_for_others_and_blocks_new_workers(
    workers: Callable[..., Workers],
) -> None:
    started = workers(50)
    started.start(2)
    until(lambda: started.inside == 2)
    started.start_alone()
    until(lambda: started.memory.wait_count == 1)
    started.start(1)
    until(lambda: started.memory.wait_count == 2)
    started.leave(2)
    until(lambda: started.inside == 1)
    started.start(1)
    until(lambda: started.memory.wait_count == 3)
    assert started.inside == 1
    started.leave()
    until(lambda: started.inside == 2)


def test_workers_with_leases_make_way_for_a_worker_that_runs_alone(workers: Callable[..., Workers]) -> None:
    """Their messages follow one another without a pause, and need no room unless another worker waits."""
    started = workers(0)
    started.memory.learn(4 * GIB)
    started.start(3, has_lease=True)
    until(lambda: started.inside == 3)
    started.start_alone()
    until(lambda: started.memory.wait_count == 1)
    for _ in range(3):
        started.start(1, has_lease=True)
    until(lambda: started.memory.wait_count == 4)
    # Each worker gives way before it waits.
    until(lambda: started.gave_way == ["the large one", *["a small one"] * 3])
    started.leave(3)
    until(lambda: started.entered[3:] == ["the large one"])
    started.start(1, has_lease=True)
    until(lambda: started.memory.wait_count == 5)
    assert started.inside == 1
    started.leave()
    until(lambda: started.inside == 1 and started.entered[-1] == "a small one")


def test_a_wait_ends_when_the_message_is_cancelled(workers: Callable[..., Workers]) -> None:
    started = workers(50)
    started.start(1)
    until(lambda: started.inside == 1)
    is_cancelled = threading.Event()

    def check() -> None:
        if is_cancelled.is_set():
            raise KeyError

    started.start_alone(check=check)
    until(lambda: started.memory.wait_count == 1)
    is_cancelled.set()
    started.memory.wake()
    until(lambda: len(started.errors) == 1)
    assert started.inside == 1
    # No worker waits to be alone any more.
    started.start(1)
    until(lambda: started.inside == 2)


def test_two_workers_run_alone_in_turn_and_log_what_they_wait_for(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    started = workers(50)
    started.start(2)
    until(lambda: started.inside == 2)
    for count, name in enumerate(["first", "second"], 1):
        started.start_alone(name)
        until(lambda count=count: started.memory.wait_count == len(caplog.messages) == count)
    assert caplog.messages == [
        f"{name} waits to be handled alone: a small one and 1 other are still in flight"
        for name in ("first", "second")
    ]
    started.start_alone("third", timeout_s=0.05)
    until(lambda: len(started.errors) == 1)
    assert "third could not be handled alone within lease_timeout_s=0.05: a small one and" in str(
        started.errors[0]
    )
    started.leave(2)
    until(lambda: started.entered[2:] == ["first"])
    started.leave()
    until(lambda: started.entered[2:] == ["first", "second"])
    assert started.inside == 1


def test_this_host_reports_its_memory() -> None:
    memory = control_group.available_memory()
    available, total = memory
    assert 0 <= available <= total
    assert total > 1 << 26
