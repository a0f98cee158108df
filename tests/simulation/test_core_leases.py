"""The cores of a simulated run: kept from message to message, and released to other runs that wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from flower_gpu.calls.leasing import Leasing
from flower_gpu.calls.settings import call_settings
from flower_gpu.control_group import all_cores
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.footprint_rule import ON_CPU, Key
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.options import CPU_LEASES
from flower_gpu.simulation import leased_worker, workers
from flower_gpu.simulation.leased_worker import CoreShare, Request
from flower_gpu.simulation.pool import WorkerPool

ALL = 1000 * all_cores()
KEY = Key("app", "", ON_CPU)

_OTHER = f"""
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.ledger import Ledger, Claimant
ledger = Ledger()
claimant = Claimant(count=0, host_needs=lambda: (HostNeed(CORES, {ALL}, {ALL}),))
ticket = ledger.acquire(claimant)
print("granted", flush=True)
input()
ledger.release(ticket)
"""


class CancelledError(Exception):
    pass


class Cores:
    """A pool whose messages need cores only."""

    def __init__(self, max_leases: int) -> None:
        self.pool = WorkerPool(cores=CoreShare(ALL // max_leases, max_leases, "messages of app"))

    @contextmanager
    def hold(
        self, check: Callable[[], object] = lambda: None, num_cpus: float | None = None
    ) -> Iterator[None]:
        settings = call_settings({})
        host = replace(settings.host, num_cpus=num_cpus)
        request = Request("a message", check, Leasing(settings.gpu, (), "a message", KEY, {}, host))
        worker = self.pool.take(request)
        try:
            yield
        finally:
            self.pool.put_back(request, worker)


@pytest.fixture
def make_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Cores]]:
    monkeypatch.setenv("FLOWER_GPU_LEDGER_DIR", str(tmp_path))
    with ExitStack() as stack:

        def make(max_leases: int) -> Cores:
            cores = Cores(max_leases)
            stack.callback(cores.pool.close)
            return cores

        yield make


def leased() -> int:
    return Ledger().status().leased_bytes(CORES)


def test_messages_get_the_cores_that_they_request(make_leases: Callable[[int], Cores]) -> None:
    cores = make_leases(2)
    granted = threading.Event()

    def hold_all() -> None:
        with cores.hold(num_cpus=ALL / 1000):
            granted.set()
            done.wait(60)

    done = threading.Event()
    asking = threading.Thread(target=hold_all)
    with cores.hold():
        with cores.hold():
            asking.start()
        until(lambda: leased() == ALL // 2, "the lease goes to who asks for more, once its message is over")
        assert not granted.is_set()
    assert granted.wait(60) and leased() == ALL
    done.set()
    asking.join(60)
    with cores.hold():
        assert leased() == ALL // 2


def test_a_run_keeps_its_leases_until_another_run_waits(make_leases: Callable[[int], Cores]) -> None:
    cores = make_leases(2)
    with cores.hold():
        assert leased() == ALL // 2
        # The third context exceeds the number of leases, so it shares an existing lease.
        with cores.hold(), cores.hold():
            assert leased() == ALL // 2 * 2
    assert leased() == ALL // 2 * 2
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "granted\n"
        looks = iter(range(3))

        def check() -> None:
            if next(looks, None) is None:
                raise CancelledError

        with pytest.raises(CancelledError), cores.hold(check):
            pytest.fail("it has cores that another process holds")
        other.communicate("\n", timeout=60)
    finally:
        other.kill()
        other.wait()
    with cores.hold():
        assert leased() == ALL // 2
    cores.pool.end_parked()
    until(lambda: leased() == 0)


def test_another_call_of_the_same_process_gets_cores(make_leases: Callable[[int], Cores]) -> None:
    """The server's evaluation requests a number of cores."""
    cores = make_leases(2)
    with cores.hold(), cores.hold():
        pass
    claimant = Claimant(count=0, host_needs=lambda: (HostNeed(CORES, ALL // 2, ALL // 2),))
    ledger = Ledger()
    ends = time.monotonic() + 60
    ledger.release(ledger.acquire(claimant, deadline=lambda: ends))


def test_short_messages_share_a_turn_while_others_wait(
    make_leases: Callable[[int], Cores], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_worker, "_TURN_S", 3600.0)
    cores, granted = make_leases(1), threading.Event()

    def wait() -> None:
        ledger = Ledger()
        claimant = Claimant(count=0, host_needs=lambda: (HostNeed(CORES, ALL, ALL),), label="another")
        ledger.release(ledger.acquire(claimant))
        granted.set()

    with cores.hold():
        (lease,) = Ledger().status().holders
        other = threading.Thread(target=wait, daemon=True)
        other.start()
        until(lambda: Ledger().status().waiting)
    for _ in range(5):
        with cores.hold():
            assert [entry.id for entry in Ledger().status().holders] == [lease.id]
    assert not granted.is_set()
    cores.pool.end_parked()
    assert granted.wait(60)
    other.join(60)
    until(lambda: leased() == 0)


def test_no_cores_are_requested_without_leases() -> None:
    settings = call_settings({"env": {CPU_LEASES.variable: "off"}})
    assert workers.core_share(settings, 2, 2, "app") is None
    assert workers.core_share(call_settings({}), 2, 2, "app") is not None
