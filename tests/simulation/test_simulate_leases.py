"""Simulations on a host with stub GPUs: which worker holds a lease, for how long, and next to other runs."""

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


def max_concurrent_leases(done: Simulation) -> int:
    held: set[str] = set()
    max_count = 0
    for event in events(done, "lease_granted", "lease_released"):
        (held.add if event["event"] == "lease_granted" else held.discard)(event["lease"])
        max_count = max(max_count, len(held))
    return max_count


def begun(done: Simulation, after: float, before: float) -> Counter[str]:
    """Return the number of calls under each lease that started within a period."""
    calls = events(done, "worker_started")
    return Counter(call["lease"] for call in calls if after < call["time"] < before)


def test_a_reused_worker_keeps_its_lease_until_its_last_call_ends(one_gpu: StubHost) -> None:
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
    assert 1 <= max_concurrent_leases(done) <= 2
    first, second = ({call["lease"] for call in part} for part in (done.calls[:6], done.calls[6:]))
    assert first & second, "a worker that may handle more messages waits for the next round"
    assert one_gpu.status().holders == ()


def test_the_ledger_names_the_current_client_of_a_reused_worker(one_gpu: StubHost) -> None:
    """Workers read the ledger in the middle of each call."""
    options = ("--num-gpus", "0.5", "--calls-per-worker", "9", "--gpu", "require")
    done = one_gpu.simulate(6, *options, "--run-config", "num-server-rounds=2", app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    notes = one_gpu.notes()
    assert len(notes) == 12 and len({note["lease"] for note in notes}) < 12, "workers are used again"
    for note in notes:
        assert note["label"] == f"train of client {note['partition']}"


@pytest.mark.parametrize(("method", "rounds"), [("forkserver", 2), ("spawn", 1), ("in-process", 1)])
def test_a_worker_for_a_single_call_holds_a_lease_until_the_call_ends(
    one_gpu: StubHost, method: str, rounds: int
) -> None:
    options = ["--num-gpus", "1", "--gpu", "require", "--calls-per-worker", "1"]
    options += ["--run-config", f"num-server-rounds={rounds}"]
    done = one_gpu.simulate(2, *options, app="leased", FLOWER_GPU_START_METHOD=method)
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    notes = one_gpu.notes()
    assert len(notes) == 2 * rounds and all(note["is_in_ledger"] for note in notes)
    assert {note["descriptor_is_ticket"] for note in notes} == {None if method == "in-process" else True}
    assert len({call["lease"] for call in done.calls}) == 2 * rounds and max_concurrent_leases(done) == 1
    if method != "in-process":
        assert len({note["pid"] for note in notes}) == done.summary["workers_started"] == 2 * rounds
    assert not done.summary["recycling"]["is_used_again"]
    assert one_gpu.status().holders == ()


def test_a_call_on_the_cpu_holds_no_lease(one_gpu: StubHost) -> None:
    """The worker of the previous call has a lease, and waits for the next call on the GPU."""
    options = ["--num-gpus", "0.5", "--max-workers", "1", "--run-config", "server='mixed'"]
    options += ["--calls-per-worker", "9"]
    done = one_gpu.simulate(4, *options, app="leased")
    assert done.status == 0, done.output
    notes = one_gpu.notes()
    assert [note["lease"] is not None for note in notes] == [True, False] * 2
    on_gpu = {note["pid"] for note in notes if note["lease"] is not None}
    on_cpu = {note["pid"] for note in notes if note["lease"] is None}
    assert len(on_gpu) == len(on_cpu) == 1 and not on_gpu & on_cpu
    assert [note["holders"] for note in notes] == [1] * 4


def test_a_missing_required_gpu_is_an_error_before_the_run_starts(tmp_path: Path) -> None:
    host = StubHost(tmp_path, gpus=0)
    done = subprocess.run(
        command("plain", 3, "--log-dir", str(host.logs), "--gpu", "require"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    # A busy host may log slow imports.
    lines = [line for line in done.stderr.splitlines() if ": importing " not in line]
    assert done.returncode == 2 and len(lines) == 1 and "GPU" in lines[0]
    assert not host.logs.exists()


def test_another_run_gets_a_lease_within_the_time_of_a_call(one_gpu: StubHost) -> None:
    options = ["--num-gpus", "0.5", "--gpu", "require", "--run-config", "seconds=0.5"]
    options += ["--calls-per-worker", "16"]
    with one_gpu.simulating(12, *options, app="leased", name="first") as first:
        one_gpu.until(lambda state: len(state.holders) == 2)
        second = one_gpu.simulate(3, *options, app="leased")
        done = first.ended()
    assert done.summary["failed"] == second.summary["failed"] == 0, done.output + second.output
    asked = min(event["time"] for event in events(second, "lease_requested"))
    granted = min(event["time"] for event in events(second, "lease_granted"))
    # A worker between two calls at that moment may have checked just before.
    assert max(begun(done, asked, granted).values(), default=0) <= 1
    assert max(Counter(call["lease"] for call in done.calls).values()) > 1, (
        "without others it keeps its lease"
    )


def test_a_measurement_does_not_make_the_round_serial(tmp_path: Path) -> None:
    # Nothing is known of a GPU with this name.
    host = StubHost(tmp_path, gpus=1, name=f"NVIDIA Stub {tmp_path.name}")
    options = ["--max-workers", "4", "--gpu", "require", "--lease-timeout-s", "2"]
    with observed_states(host.ledger, lambda state: len(state.holders)) as looks:
        done = host.simulate(8, *options, "--run-config", "seconds=0.3 take-gib=1.0", app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    granted = {event["lease"]: event["alone"] for event in events(done, "lease_granted")}
    calls = Counter(call["lease"] for call in done.calls)
    assert [calls[lease] for lease, alone in granted.items() if alone] == [1]
    assert max(looks) == 4


def test_a_retry_shares_its_gpu_with_no_other_worker(one_gpu: StubHost) -> None:
    options = ["--gpu-memory", "7GiB", "--gpu", "require", "--run-config", "seconds=0.3 too-much='3'"]
    options += ["--calls-per-worker", "16", "--lease-timeout-s", "2"]
    done = one_gpu.simulate(8, *options, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    (again,) = [event for event in events(done, "lease_requested") if event["memory_bytes"] > 7 * GIB]
    (granted,) = [event for event in events(done, "lease_granted") if event["alone"]]
    assert [note["partition"] for note in one_gpu.notes() if note["alone"]] == [3]
    # Workers of the same run delay the retry only for the rest of their calls.
    assert max(begun(done, again["time"], granted["time"]).values(), default=0) <= 1


def test_the_time_limit_counts_only_waiting_for_other_runs(one_gpu: StubHost) -> None:
    with one_gpu.leased(1, "0.9"):
        done = one_gpu.simulate(6, "--num-gpus", "0.25", "--lease-timeout-s", "1", app="leased")
    assert done.summary["failed"] == 6
    assert "another" in done.output and "no lease within lease_timeout_s=1" in done.output


def test_no_time_limit_applies_while_a_run_progresses_next_to_another(tmp_path: Path) -> None:
    """The run has more threads than leases next to the other run, so its messages wait within the run."""
    host = StubHost(tmp_path, gpus=2)
    options = ["--num-gpus", "0.25", "--max-workers", "16", "--lease-timeout-s", "1"]
    with host.leased(2, "0.5"), observed_states(host.ledger, lambda state: state) as looks:
        done = host.simulate(24, *options, "--run-config", "seconds=0.3", app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert max(len(state.holders) for state in looks) == 1 + 4
    assert max(len(state.waiting) for state in looks) == 1
    # The run's own ticket in the ledger takes no lease from its workers.
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


def test_a_host_without_a_gpu_is_reported_as_such_and_not_as_a_policy(tmp_path: Path) -> None:
    """The server requests a GPU with some of the messages."""
    host = StubHost(tmp_path, gpus=0)
    del host.env["FLOWER_GPU_POLICY"]
    done = host.simulate(4, "--run-config", "server='mixed'", app="leased")
    assert done.status == 0, done.output
    assert "no GPU here: calls run on the CPU" in done.output
    assert done.output.count("this call runs on the CPU although the server requests a GPU") == 1
    assert "policy" not in done.output, done.output
