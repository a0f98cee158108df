"""Simulations on a host with stub GPUs: who holds which lease and for how long, beside other runs."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from ledger_observer import observed_states
from nvml_stub import GIB
from simulations import TIMEOUT_S, Simulation, command
from stub_host import StubHost, events

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


def begun(done: Simulation, after: float, before: float) -> Counter[str]:
    """Return how many calls began in a time, under each lease."""
    calls = events(done, "worker_started")
    return Counter(call["lease"] for call in calls if after < call["time"] < before)


def test_a_used_worker_keeps_its_lease_until_its_calls_are_over(one_gpu: StubHost) -> None:
    done = one_gpu.simulate(6, "--num-gpus", "0.5", "--calls-per-worker", "4", "--gpu", "require")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert len(done.calls) == 12
    pids_of: dict[str, set[int]] = {}
    for call in done.calls:
        pids_of.setdefault(call["lease"], set()).add(call["pid"])
    assert all(len(pids) == 1 for pids in pids_of.values())
    assert max(Counter(call["lease"] for call in done.calls).values()) == 4
    granted, released = (
        Counter(e["lease"] for e in events(done, n)) for n in ("lease_granted", "lease_released")
    )
    assert granted == released == Counter(dict.fromkeys(pids_of, 1))
    assert 1 <= most_leases_at_a_time(done) <= 2
    first, second = ({call["lease"] for call in part} for part in (done.calls[:6], done.calls[6:]))
    assert first & second, "a worker that may handle more messages waits for the next round"
    assert one_gpu.status().holders == ()


def test_the_ledger_names_the_client_that_a_used_worker_serves_now(one_gpu: StubHost) -> None:
    """Workers look themselves, in the middle of each call."""
    options = ("--num-gpus", "0.5", "--calls-per-worker", "9", "--gpu", "require")
    done = one_gpu.simulate(6, *options, "--run-config", "num-server-rounds=2", app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    notes = one_gpu.notes()
    assert len(notes) == 12 and len({note["lease"] for note in notes}) < 12, "workers are used again"
    for note in notes:
        assert note["label"] == f"train of client {note['partition']}"


@pytest.mark.parametrize(("method", "rounds"), [("forkserver", 2), ("spawn", 1), ("in-process", 1)])
def test_one_call_per_worker_has_a_lease_of_its_own_until_its_end(
    one_gpu: StubHost, method: str, rounds: int
) -> None:
    options = ["--num-gpus", "1", "--gpu", "require", "--calls-per-worker", "1"]
    options += ["--run-config", f"num-server-rounds={rounds}"]
    done = one_gpu.simulate(2, *options, app="leased", FLOWER_GPU_START_METHOD=method)
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    notes = one_gpu.notes()
    assert len(notes) == 2 * rounds and all(note["is_in_ledger"] for note in notes)
    assert {note["descriptor_is_ticket"] for note in notes} == {None if method == "in-process" else True}
    assert len({call["lease"] for call in done.calls}) == 2 * rounds and most_leases_at_a_time(done) == 1
    if method != "in-process":
        assert len({note["pid"] for note in notes}) == done.summary["workers_started"] == 2 * rounds
    assert not done.summary["recycling"]["is_used_again"]
    assert one_gpu.status().holders == ()


def test_a_call_on_the_cpu_holds_no_lease(one_gpu: StubHost) -> None:
    """Though its slot had one for the call before, and would have kept it for the next."""
    options = ["--num-gpus", "0.5", "--max-workers", "1", "--run-config", "mixed=true"]
    options += ["--calls-per-worker", "2"]
    done = one_gpu.simulate(4, *options, app="leased")
    assert done.status == 0, done.output
    notes = one_gpu.notes()
    assert [note["lease"] is not None for note in notes] == [True, False] * 2
    assert [note["holders"] for note in notes] == [1, 0] * 2


def test_a_gpu_that_is_required_and_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    host = StubHost(tmp_path, gpus=0)
    done = subprocess.run(
        command("plain", 3, "--log-dir", str(host.logs), "--gpu", "require"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = [line for line in done.stderr.splitlines() if ": importing " not in line]  # on a busy host
    assert done.returncode == 2 and len(said) == 1 and "GPU" in said[0]
    assert not host.logs.exists()


def test_another_run_gets_its_turn_within_one_call(one_gpu: StubHost) -> None:
    options = ["--num-gpus", "0.5", "--gpu", "require", "--run-config", "seconds=0.5"]
    options += ["--calls-per-worker", "16"]
    with one_gpu.simulating(12, *options, app="leased", name="first") as first:
        one_gpu.until(lambda state: len(state.holders) == 2)
        second = one_gpu.simulate(3, *options, app="leased")
        done = first.ended()
    assert done.summary["failed"] == second.summary["failed"] == 0, done.output + second.output
    asked = min(event["time"] for event in events(second, "lease_requested"))
    granted = min(event["time"] for event in events(second, "lease_granted"))
    # A worker that was between two calls at that moment may just have looked.
    assert max(begun(done, asked, granted).values(), default=0) <= 1
    assert max(Counter(call["lease"] for call in done.calls).values()) > 1, (
        "without others it keeps its lease"
    )


def test_a_measurement_does_not_make_the_round_serial(tmp_path: Path) -> None:
    host = StubHost(tmp_path, gpus=1, name=f"NVIDIA Stub {tmp_path.name}")  # of which nothing is known yet
    options = ["--max-workers", "4", "--gpu", "require", "--lease-timeout-s", "2"]
    with observed_states(host.ledger, lambda state: len(state.holders)) as looks:
        done = host.simulate(8, *options, "--run-config", "seconds=0.3 take-gib=1.0", app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    granted = {event["lease"]: event["alone"] for event in events(done, "lease_granted")}
    calls = Counter(call["lease"] for call in done.calls)
    assert [calls[lease] for lease, alone in granted.items() if alone] == [1]
    assert max(looks) == 4


def test_a_second_try_has_its_lease_for_itself(one_gpu: StubHost) -> None:
    options = ["--gpu-memory", "7GiB", "--gpu", "require", "--run-config", "seconds=0.3 too-much='3'"]
    options += ["--calls-per-worker", "16", "--lease-timeout-s", "2"]
    done = one_gpu.simulate(8, *options, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    (again,) = [event for event in events(done, "lease_requested") if event["memory_bytes"] > 7 * GIB]
    (granted,) = [event for event in events(done, "lease_granted") if event["alone"]]
    assert [note["partition"] for note in one_gpu.notes() if note["alone"]] == [3]
    # Nor do workers of its own run keep it waiting for longer than the calls that they have.
    assert max(begun(done, again["time"], granted["time"]).values(), default=0) <= 1


def test_the_time_limit_is_for_waiting_for_others(one_gpu: StubHost) -> None:
    with one_gpu.leased(1, "0.9"):
        done = one_gpu.simulate(6, "--num-gpus", "0.25", "--lease-timeout-s", "1", app="leased")
    assert done.summary["failed"] == 6
    assert "another" in done.output and "no lease within lease_timeout_s=1" in done.output


def test_a_run_that_goes_on_beside_another_has_no_time_limit(tmp_path: Path) -> None:
    """Though it has more threads than the other one leaves it leases: its messages wait in itself."""
    host = StubHost(tmp_path, gpus=2)
    options = ["--num-gpus", "0.25", "--max-workers", "16", "--lease-timeout-s", "1"]
    with host.leased(2, "0.5"), observed_states(host.ledger, lambda state: state) as looks:
        done = host.simulate(24, *options, "--run-config", "seconds=0.3", app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert max(len(state.holders) for state in looks) == 1 + 4
    assert max(len(state.waiting) for state in looks) == 1
    # Its own ticket in the ledger takes no lease from its own workers.
    assert max(Counter(call["lease"] for call in done.calls).values()) > 1


def test_ctrl_c_ends_a_run_that_waits_for_a_lease(one_gpu: StubHost) -> None:
    with (
        one_gpu.leased(1, "0.9"),
        one_gpu.simulating(6, "--num-gpus", "0.25", "--max-workers", "6", app="leased") as run,
    ):
        one_gpu.until(lambda state: state.waiting)
        run.process.send_signal(signal.SIGINT)
        assert run.ended().status == 130
        assert not one_gpu.status().waiting


def test_a_host_without_a_gpu_says_so_and_blames_no_policy(tmp_path: Path) -> None:
    """The server asks for a GPU with some of the messages."""
    host = StubHost(tmp_path, gpus=0)
    del host.env["FLOWER_GPU_POLICY"]
    done = host.simulate(4, "--run-config", "mixed=true", app="leased")
    assert done.status == 0, done.output
    assert "no GPU here: calls run on the CPU" in done.output
    assert done.output.count("this call runs on the CPU though the server requests a GPU") == 1
    assert "policy" not in done.output, done.output
