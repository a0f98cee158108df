"""The cores of a simulated run: kept from message to message, and released to other runs that wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from flower_gpu.calls.settings import HostSettings, call_settings
from flower_gpu.control_group import all_cores
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.simulation import workers
from flower_gpu.simulation.workers import CoreLeases

ALL = 1000 * all_cores()

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


@pytest.fixture
def make_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CoreLeases]]:
    monkeypatch.setenv("FLOWER_GPU_LEDGER_DIR", str(tmp_path))
    with ExitStack() as stack:

        def make(max_leases: int, settings: HostSettings | None = None) -> CoreLeases:
            leases = CoreLeases(
                settings or call_settings({}).host, ALL // max_leases, max_leases, "messages of app"
            )
            stack.callback(leases.close)
            return leases

        yield make


def leased() -> int:
    return Ledger().status().leased_bytes(CORES)


def test_messages_get_the_cores_that_they_request(make_leases: Callable[..., CoreLeases]) -> None:
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


def test_a_run_keeps_its_leases_until_another_run_waits(make_leases: Callable[..., CoreLeases]) -> None:
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
    cores.close()
    until(lambda: leased() == 0)


def test_another_call_of_the_same_process_gets_cores(make_leases: Callable[..., CoreLeases]) -> None:
    """The server's evaluation requests a number of cores."""
    cores = make_leases(2)
    with cores.hold(), cores.hold():
        pass
    claimant = Claimant(count=0, host_needs=lambda: (HostNeed(CORES, ALL // 2, ALL // 2),))
    ledger = Ledger()
    ends = time.monotonic() + 60
    ledger.release(ledger.acquire(claimant, deadline=lambda: ends))


@pytest.mark.parametrize(("turn_s", "asked"), [(60.0, 1), (0.0, 5)])
def test_short_messages_share_a_turn_while_other_runs_wait(
    turn_s: float, asked: int, make_leases: Callable[..., CoreLeases], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_TURN_S", turn_s)
    monkeypatch.setattr(workers, "_LOOK_S", 60.0)
    claimants: list[Claimant] = []
    acquire = Ledger.acquire
    monkeypatch.setattr(
        Ledger, "acquire", lambda *args, **rest: claimants.append(args[1]) or acquire(*args, **rest)
    )
    cores = make_leases(1)
    cores._is_wanted = True
    for _ in range(5):
        with cores.hold():
            assert leased() == ALL
    assert len(claimants) == asked
    cores.close()
    assert leased() == 0


def test_no_cores_are_requested_without_leases(make_leases: Callable[..., CoreLeases]) -> None:
    with make_leases(2, replace(call_settings({}).host, is_leased=False)).hold():
        assert leased() == 0
