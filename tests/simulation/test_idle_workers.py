"""Workers on a GPU that wait for the next round: reused, released on request, or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cuda_stub
import pytest
from live_processes import is_running
from nvml_stub import GIB
from simulations import TIMEOUT_S, Simulation
from stub_host import Running, StubHost, events

from flower_gpu import trace

pytestmark = pytest.mark.timeout(240)

OPTIONS = ("--gpu", "require", "--num-gpus", "0.25", "--max-workers", "4")


@contextmanager
def pausing(host: StubHost, clients: int = 4, **env: str) -> Iterator[tuple[Running, list[int]]]:
    """Run a simulation until the workers of all clients are idle. Yield it and the pids."""
    options = (*OPTIONS, "--run-config", "pauses=true seconds=0.3")
    with host.simulating(clients, *options, app="leased", name="first", **env) as run:
        state = host.until(lambda state: sum(entry.is_idle() for entry in state.holders) == clients)
        yield run, [entry.reported()[0] for entry in state.holders]


def pids(done: Simulation) -> set[int]:
    return {event["pid"] for event in events(done, "worker_started")}


def test_waiting_messages_reuse_the_idle_workers_of_others(one_gpu: StubHost) -> None:
    """Five of eight threads have a lease. Their workers stay from round to round, and no others start."""
    options = ["--gpu", "require", "--gpu-memory", "3GiB", "--max-workers", "8"]
    config = "num-server-rounds=3 seconds=0.2"
    done = one_gpu.simulate(12, *options, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    # Five leases of 3 GiB fit on a GPU of 16 GiB.
    assert len(pids(done)) == done.summary["workers_started"] == 5
    assert done.summary["recycling"]["is_used_again"] and one_gpu.status().holders == ()


def test_the_servers_evaluation_ends_only_the_workers_in_its_way(one_gpu: StubHost) -> None:
    config = "num-server-rounds=3 seconds=0.3 server-evaluates=true"
    done = one_gpu.simulate(4, *OPTIONS, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    server_leases = [
        event
        for event in trace.read(done.folder / trace.FILE_NAME)
        if event["event"] == "lease_granted" and event["client"] == "server"
    ]
    # The server also evaluates before the first round.
    assert len(server_leases) == 4
    # One worker is started again after each evaluation except the last.
    assert len(pids(done)) == 4 + 2


def test_idle_workers_end_on_demand_and_killed_workers_release_their_leases(one_gpu: StubHost) -> None:
    with pausing(one_gpu) as (run, idle):
        command = [sys.executable, "-m", "flower_gpu.cli", "leases"]
        env = {**os.environ, **one_gpu.host.env, **one_gpu.env}
        as_text, as_json = (
            subprocess.run([*command, *options], capture_output=True, text=True, env=env, check=True).stdout
            for options in ([], ["--json"])
        )
        assert as_text.count(", idle)") == 4
        assert [holder["is_idle"] for holder in json.loads(as_json)["holders"]] == [True] * 4
        for share, remaining in (("0.25", 3), ("0.5", 2)):
            with one_gpu.leased(1, share):
                one_gpu.until(lambda state, remaining=remaining: len(state.holders) == remaining + 1)
                idle = [pid for pid in idle if is_running(pid)]
                assert len(idle) == remaining
        os.kill(idle[0], signal.SIGKILL)
        one_gpu.until(lambda state: len(state.holders) == 1)
        # The next message finds the worker dead, or its lease already released.
        os.kill(idle[1], signal.SIGKILL)
        one_gpu.go_on()
        done = run.ended()
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert done.summary["workers_started"] == len(pids(done)) == 8


def test_a_retry_within_the_run_gets_the_whole_gpu(one_gpu: StubHost) -> None:
    """Client 3 needs more than its lease while the workers of the other three clients are idle."""
    config = "seconds=0.3 too-much='3'"
    options = ["--gpu", "require", "--gpu-memory", "4GiB", "--max-workers", "4"]
    done = one_gpu.simulate(4, *options, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert [note["partition"] for note in one_gpu.notes() if note["alone"]] == [3]


def test_a_retry_with_all_main_memory_ends_all_idle_workers(one_gpu: StubHost) -> None:
    """Client 3 is killed in the second round. The workers of the others wait, each with a lease."""
    config = "num-server-rounds=3 seconds=0.3 killed=3"
    done = one_gpu.simulate(4, *OPTIONS, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert done.output.count("handled again while no other message is") == 1
    rounds = [[call for call in done.calls if call["round"] == number] for number in (1, 2, 3)]
    (second_try,) = (call for call in rounds[1] if call["client"] == "3" and call["outcome"] == "ok")
    later = [call for call in rounds[1] if call["time"] > second_try["time"]]
    assert len(rounds[2]) == 4
    first_pids = {call["pid"] for call in rounds[0]}
    assert not first_pids & {call["pid"] for call in (second_try, *later, *rounds[2])}


def test_an_idle_worker_holds_its_context_only(
    tmp_path: Path, cuda_host: Callable[..., cuda_stub.Host]
) -> None:
    """An idle worker reports only its context.

    So memory that others allocate on the rest of the GPU is not attributed to the worker.
    """
    context = 450 << 20
    host = cuda_host(gpus=1)
    host.set(0, context=context)
    stub = StubHost(tmp_path, gpus=1, host=host)
    with pausing(stub, clients=2, LEASED_APP_TENSOR=str(GIB)) as (run, idle):
        stub.until(lambda _: host.used(0) == 2 * context)
        assert {entry.reported()[1][host.uuids[0]] for entry in stub.status().holders} == {context}
        assert_idle_workers_end_with_the_run(stub, run, idle, signal.SIGINT)


def test_a_waiter_with_another_reserve_gets_the_gpu_as_well(one_gpu: StubHost) -> None:
    """By the waiter's reserve there is no room, by the holders' there is.

    So no idle worker is asked to end.
    """
    program = [sys.executable, str(Path(__file__).with_name("odd_waiter.py"))]
    with pausing(one_gpu) as (run, idle):
        env = {**os.environ, **one_gpu.host.env, **one_gpu.env}
        subprocess.run(program, env=env, timeout=TIMEOUT_S, check=True)
        assert_idle_workers_end_with_the_run(one_gpu, run, idle, signal.SIGKILL)


def assert_idle_workers_end_with_the_run(
    host: StubHost, run: Running, idle: list[int], number: signal.Signals
) -> None:
    """Signal a run, and check that its idle workers and their leases end with it."""
    run.process.send_signal(number)
    run.process.wait(TIMEOUT_S)
    host.until(lambda state: not state.holders and not any(map(is_running, idle)))
