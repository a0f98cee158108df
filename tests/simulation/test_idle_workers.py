"""Workers on a GPU that wait for the next round: used again, asked to go by others, or lost."""

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


@pytest.fixture
def one_gpu(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path, gpus=1)


@contextmanager
def pausing(host: StubHost, clients: int = 4, **env: str) -> Iterator[tuple[Running, list[int]]]:
    """Run a simulation until the workers of all clients wait; yield their pids."""
    options = (*OPTIONS, "--run-config", "pauses=true seconds=0.3")
    with host.simulating(clients, *options, app="leased", name="first", **env) as run:
        state = host.until(lambda state: sum(entry.is_idle() for entry in state.holders) == clients)
        yield run, [entry.reported()[0] for entry in state.holders]


def pids(done: Simulation) -> set[int]:
    return {event["pid"] for event in events(done, "worker_started")}


def test_messages_that_wait_for_a_lease_get_the_workers_of_others(one_gpu: StubHost) -> None:
    """Of eight threads five have a lease: their workers stay from round to round, and no others start."""
    options = ["--gpu", "require", "--gpu-memory", "3GiB", "--max-workers", "8"]
    config = "num-server-rounds=3 seconds=0.2"
    done = one_gpu.simulate(12, *options, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert len(pids(done)) == done.summary["workers_started"] == 5  # of 16 GiB
    assert done.summary["recycling"]["is_used_again"] and one_gpu.status().holders == ()


def test_the_servers_evaluation_ends_as_many_as_stand_in_its_way(one_gpu: StubHost) -> None:
    config = "num-server-rounds=3 seconds=0.3 evaluates=true"
    done = one_gpu.simulate(4, *OPTIONS, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    of_server = [
        event
        for event in trace.read(done.folder / trace.FILE_NAME)
        if event["event"] == "lease_granted" and event["client"] == "server"
    ]
    assert len(of_server) == 4  # also before the first round
    assert len(pids(done)) == 4 + 2  # one is started anew after each evaluation but the last


def test_as_many_workers_end_as_others_need_and_who_is_killed_gives_its_lease_back(one_gpu: StubHost) -> None:
    with pausing(one_gpu) as (run, idle):
        command = [sys.executable, "-m", "flower_gpu.cli", "leases"]
        env = {**os.environ, **one_gpu.host.env, **one_gpu.env}
        shown, told = (
            subprocess.run([*command, *options], capture_output=True, text=True, env=env, check=True).stdout
            for options in ([], ["--json"])
        )
        assert shown.count(", idle)") == 4
        assert [holder["is_idle"] for holder in json.loads(told)["holders"]] == [True] * 4
        for share, left in (("0.25", 3), ("0.5", 2)):
            with one_gpu.leased(1, share):
                one_gpu.until(lambda state, left=left: len(state.holders) == left + 1)
                idle = [pid for pid in idle if is_running(pid)]
                assert len(idle) == left
        os.kill(idle[0], signal.SIGKILL)
        one_gpu.until(lambda state: len(state.holders) == 1)
        os.kill(idle[1], signal.SIGKILL)  # the next message may find it dead, or its lease given back
        one_gpu.go_on()
        done = run.ended()
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert done.summary["workers_started"] == len(pids(done)) == 8


def test_a_second_try_of_the_run_itself_gets_the_whole_gpu(one_gpu: StubHost) -> None:
    """Client 3 needs more than its lease, while the workers of the other three have no message."""
    config = "seconds=0.3 too-much='3'"
    options = ["--gpu", "require", "--gpu-memory", "4GiB", "--max-workers", "4"]
    done = one_gpu.simulate(4, *options, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert [note["partition"] for note in one_gpu.notes() if note["alone"]] == [3]


def test_a_second_try_with_all_main_memory_ends_all_workers_that_wait(one_gpu: StubHost) -> None:
    """Client 3 is killed in the second round. The workers of the others wait with a lease each."""
    config = "num-server-rounds=3 seconds=0.3 killed=3"
    done = one_gpu.simulate(4, *OPTIONS, "--run-config", config, app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    assert done.output.count("handled again while no other message is") == 1
    rounds = [[call for call in done.calls if call["round"] == number] for number in (1, 2, 3)]
    (second_try,) = (call for call in rounds[1] if call["client"] == "3" and call["outcome"] == "ok")
    later = [call for call in rounds[1] if call["time"] > second_try["time"]]
    assert len(rounds[2]) == 4
    of_first_round = {call["pid"] for call in rounds[0]}
    assert not of_first_round & {call["pid"] for call in (second_try, *later, *rounds[2])}


def test_an_idle_worker_holds_its_context_only(
    tmp_path: Path, cuda_host: Callable[..., cuda_stub.Host]
) -> None:
    """And reports that: what others take of the rest of the GPU is not taken for its own."""
    context = 450 << 20
    host = cuda_host(gpus=1)
    host.set(0, context=context)
    stub = StubHost(tmp_path, gpus=1, host=host)
    with pausing(stub, clients=2, LEASED_APP_TENSOR=str(GIB)) as (run, idle):
        stub.until(lambda _: host.used(0) == 2 * context)
        assert {entry.reported()[1][host.uuids[0]] for entry in stub.status().holders} == {context}
        assert_taken_along(stub, run, idle, signal.SIGINT)


def test_who_counts_with_another_reserve_gets_the_gpu_as_well(one_gpu: StubHost) -> None:
    """Its line has no room where that of the holders has some: so nobody is asked to go."""
    program = [sys.executable, str(Path(__file__).with_name("odd_waiter.py"))]
    with pausing(one_gpu) as (run, idle):
        env = {**os.environ, **one_gpu.host.env, **one_gpu.env}
        subprocess.run(program, env=env, timeout=TIMEOUT_S, check=True)
        assert_taken_along(one_gpu, run, idle, signal.SIGKILL)


def assert_taken_along(host: StubHost, run: Running, idle: list[int], number: signal.Signals) -> None:
    """End a run; its idle workers and their leases end with it."""
    run.process.send_signal(number)
    run.process.wait(TIMEOUT_S)
    host.until(lambda state: not state.holders and not any(map(is_running, idle)))
