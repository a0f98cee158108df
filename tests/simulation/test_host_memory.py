"""Workers start only while the host has enough free memory for them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from waiting import until

from flower_gpu import control_group
from flower_gpu.calls.leasing import Leasing
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import LeaseTimeoutError
from flower_gpu.leases.footprint_rule import ON_CPU, Key
from flower_gpu.simulation import host_memory, pool
from flower_gpu.simulation.host_memory import HostMemory
from flower_gpu.simulation.leased_worker import Request
from flower_gpu.simulation.pool import WorkerPool

GIB = 1 << 30


class Workers:
    """Threads that each run one worker, on a host whose free memory the test sets."""

    def __init__(self, free: float, total: float = 100) -> None:
        self.free, self._total = free, total
        self.pool = WorkerPool()
        self.memory = self.pool.memory = HostMemory(lambda: (int(self.free * GIB), int(self._total * GIB)))
        self._lock = threading.Lock()
        self.inside = 0
        self.entered: list[str] = []
        self.errors: list[Exception] = []
        self._leave = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        for _ in range(count):
            self._start(Request("a small one", lambda: None))

    def start_alone(
        self,
        name: str = "the large one",
        check: Callable[[], object] = lambda: None,
        timeout_s: float = math.inf,
    ) -> None:
        self._start(alone(name, check, timeout_s))

    def leave(self, count: int = 1) -> None:
        self._leave.release(count)

    def end(self) -> None:
        self.free = self._total
        self._leave.release(1000)
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.inside == 0
        self.pool.close()

    def _start(self, request: Request) -> None:
        self._threads.append(threading.Thread(target=self._work, args=[request], daemon=True))
        self._threads[-1].start()

    def _work(self, request: Request) -> None:
        try:
            worker = self.pool.take(request)
            with self._lock:
                self.inside += 1
                self.entered.append(request.label)
            self._leave.acquire()
            with self._lock:
                self.inside -= 1
            self.pool.put_back(request, worker)
        except (KeyError, LeaseTimeoutError) as error:
            self.errors.append(error)


def alone(name: str, check: Callable[[], object] = lambda: None, timeout_s: float = math.inf) -> Request:
    settings = call_settings({})
    host = replace(settings.host, timeout_s=timeout_s)
    key = Key("app", "", ON_CPU)
    leasing = Leasing(settings.gpu, (), name, key, {}, host, asks_for_all_memory=True)
    return Request(name, check, leasing)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workers]]:
    monkeypatch.setattr(pool, "_POLL_S", 0.01)
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
    until(lambda: started.pool.memory_waits == 2)
    assert started.inside == 1
    started.leave()
    # The next worker is alone as well.
    until(lambda: started.pool.memory_waits == 2 and started.inside == 1)


def test_others_on_the_host_give_memory_back(workers: Callable[..., Workers]) -> None:
    started = workers(0)
    started.memory.learn(4 * GIB)
    started.start(2)
    until(lambda: started.inside == 1 and started.pool.memory_waits == 1)
    started.free = 50
    until(lambda: started.inside == 2)


def test_simultaneous_workers_do_not_claim_the_same_free_memory(workers: Callable[..., Workers]) -> None:
    """With 20 GiB free and 5 GiB kept free, three workers of 4 GiB fit."""
    started = workers(20)
    started.memory.learn(4 * GIB)
    started.start(8)
    until(lambda: started.pool.memory_waits == 5)
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
    assert started.pool.memory_waits == 0


def test_a_worker_that_runs_alone_waits_for_others_and_blocks_new_workers(
    workers: Callable[..., Workers],
) -> None:
    started = workers(50)
    started.start(2)
    until(lambda: started.inside == 2)
    started.start_alone()
    until(lambda: started.pool.memory_waits == 1)
    started.start(1)
    until(lambda: started.pool.memory_waits == 2)
    started.leave(2)
    until(lambda: started.inside == 1)
    started.start(1)
    until(lambda: started.pool.memory_waits == 3)
    assert started.inside == 1
    started.leave()
    until(lambda: started.inside == 2)


def test_workers_with_leases_make_way_for_a_worker_that_runs_alone() -> None:
    """Their messages follow one another without a pause, and need no room unless another worker waits."""
    memory = HostMemory(lambda: (0, 100 * GIB))
    memory.learn(4 * GIB)
    small = [Request(f"small {number}", lambda: None) for number in range(5)]
    large, second = alone("the large one"), alone("the second one")
    assert all(memory.enter(request, has_lease=True) for request in small[:3])
    assert not memory.enter(small[3])
    assert not memory.enter(large)
    assert memory.blocking(large) == "small 0 and 2 others are still in flight"
    memory.leave(small[0])
    assert not memory.enter(small[3], has_lease=True)
    assert not memory.enter(second)
    for request in small[1:3]:
        assert not memory.enter(large)
        memory.leave(request)
    assert not memory.enter(small[3], has_lease=True)
    assert memory.blocking(second) == "the large one is before it"
    assert memory.enter(large)
    assert not memory.enter(small[3], has_lease=True)
    assert not memory.enter(second)
    memory.leave(large)
    memory.leave(second)
    assert memory.enter(small[3])
    assert memory.enter(small[4], has_lease=True)


def test_a_wait_ends_when_the_message_is_cancelled(workers: Callable[..., Workers]) -> None:
    started = workers(50)
    started.start(1)
    until(lambda: started.inside == 1)
    is_cancelled = threading.Event()

    def check() -> None:
        if is_cancelled.is_set():
            raise KeyError

    started.start_alone(check=check)
    until(lambda: started.pool.memory_waits == 1)
    is_cancelled.set()
    started.pool.wake()
    until(lambda: len(started.errors) == 1)
    assert started.inside == 1
    # No worker waits to be alone any more.
    started.start(1)
    until(lambda: started.inside == 2)


def test_two_workers_run_alone_in_turn_and_log_what_they_wait_for(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    started = workers(50)
    started.start(2)
    until(lambda: started.inside == 2)
    for count, name in enumerate(["first", "second"], 1):
        started.start_alone(name)
        until(lambda count=count: started.pool.memory_waits == len(caplog.messages) == count)
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
