"""Simulations on a host with stub GPUs: who holds which lease, and for how long."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from simulations import TIMEOUT_S, Simulation, command
from stub_host import StubHost, events

from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.options import START_METHODS

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def one_gpu(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path, gpus=1)


def most_leases_at_a_time(done: Simulation) -> int:
    held: set[str] = set()
    most = 0
    for event in events(done, "lease_granted", "lease_released"):
        (held.add if event["event"] == "lease_granted" else held.discard)(event["lease"])
        most = max(most, len(held))
    return most


def test_a_used_worker_keeps_its_lease_until_it_ends(one_gpu: StubHost) -> None:
    done = one_gpu.simulate(8, "--num-gpus", "0.5", "--calls-per-worker", "3", "--gpu", "require")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    calls = [call for call in done.calls if "lease" in call]
    assert len(calls) == 16
    pids_of: dict[str, set[int]] = {}
    for call in calls:
        pids_of.setdefault(call["lease"], set()).add(call["pid"])
    assert all(len(pids) == 1 for pids in pids_of.values())
    assert max(Counter(call["lease"] for call in calls).values()) == 3
    granted, released = (
        Counter(e["lease"] for e in events(done, n)) for n in ("lease_granted", "lease_released")
    )
    assert granted == released == Counter(dict.fromkeys(pids_of, 1))
    assert 1 <= most_leases_at_a_time(done) <= 2


@pytest.mark.parametrize("method", [name for name in START_METHODS if name != "auto"])
def test_a_lease_is_held_until_the_end_of_the_call(one_gpu: StubHost, method: str) -> None:
    env = {"FLOWER_GPU_START_METHOD": method}
    options = ["--num-gpus", "0.5", "--max-workers", "1", "--gpu", "require"]
    done = one_gpu.simulate(3, *options, app="leased", **env)
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    notes = one_gpu.notes()
    assert len(notes) == 3 and all(note["is_in_ledger"] for note in notes)
    is_here = method in ("inline", "in-process")
    assert {note["descriptor_is_ticket"] for note in notes} == {None if is_here else True}
    assert Ledger(LedgerFolder(one_gpu.ledger)).status().holders == ()


def test_a_call_on_the_cpu_holds_no_lease(one_gpu: StubHost) -> None:
    """Though its slot had one for the call before, and would have kept it for the next."""
    options = ["--num-gpus", "0.5", "--max-workers", "1", "--run-config", "mixed=true"]
    done = one_gpu.simulate(6, *options, app="leased")
    assert done.status == 0, done.output
    notes = one_gpu.notes()
    assert [note["lease"] is not None for note in notes] == [True, False] * 3
    assert [note["holders"] for note in notes] == [1, 0] * 3


def test_a_gpu_is_empty_between_rounds(one_gpu: StubHost) -> None:
    done = one_gpu.simulate(4, "--num-gpus", "0.5")
    assert done.status == 0, done.output
    leases = [{call["lease"] for call in part} for part in (done.calls[:4], done.calls[4:])]
    assert leases[0].isdisjoint(leases[1])
    assert len(leases[0]) < 4, "on a GPU a worker handles several messages, if nothing else is said"


def test_one_call_per_worker_is_one_lease_per_call(one_gpu: StubHost) -> None:
    done = one_gpu.simulate(5, "--num-gpus", "1", "--calls-per-worker", "1")
    assert done.status == 0, done.output
    assert len({call["lease"] for call in done.calls}) == len({call["pid"] for call in done.calls}) == 10
    assert most_leases_at_a_time(done) == 1


def test_verifying_needs_no_second_gpu(one_gpu: StubHost) -> None:
    done = one_gpu.simulate(6, "--num-gpus", "1", "--calls-per-worker", "6", "--verify-recycling")
    assert done.status == 0, done.output
    assert done.summary["recycling"]["compared"] == 3
    assert done.summary["recycling"]["different_clients"] == []


def test_no_lease_is_left(one_gpu: StubHost) -> None:
    one_gpu.simulate(4, "--num-gpus", "0.25")
    assert Ledger(LedgerFolder(one_gpu.ledger)).status().holders == ()


def test_a_gpu_that_is_required_and_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    host = StubHost(tmp_path, gpus=0)
    done = subprocess.run(
        command("plain", 3, "--log-dir", str(host.logs), "--gpu", "require"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2 and "GPU" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not host.logs.exists()
