"""Cores and main memory of calls, by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calls_host import CallError, CallsHost

from flower_gpu import control_group
from flower_gpu.leases import host
from flower_gpu.leases.admission import CORES, MEMORY, Card, Claim, HostNeed, plan
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import Key
from flower_gpu.workers.threads import cores

pytestmark = pytest.mark.timeout(180)

ALL = cores()


ON_CPU = {"gpu": "never", "start_method": "fork"}


def test_calls_wait_for_cores_but_for_those_that_ask_for_nothing(calls_host: CallsHost) -> None:
    first, second, lone = (calls_host.start() for _ in range(3))
    first.tell("run", "calls_tasks:follow", [calls_host.wait("end")], num_cpus=ALL, **ON_CPU)
    calls_host.until(lambda state: state["holders"])
    assert lone("run", "calls_tasks:seen", **ON_CPU)["FLOWER_GPU_LEASE"] == ""
    second.tell("run", "calls_tasks:seen", num_cpus=0.5, **ON_CPU)
    calls_host.until_waiting(second)
    calls_host.go("end")
    first.answer()
    second.answer()
    granted = calls_host.trace("cores_granted")
    assert [one["cores"] for one in granted] == [ALL, 0.0, 0.5]
    assert granted[1]["waited_s"] < granted[2]["waited_s"]
    calls_host.until_free()


def test_a_call_within_a_call_has_the_cores_of_the_outer_one(calls_host: CallsHost) -> None:
    """With all of them leased, it would wait for its parent for ever."""
    inner = {"num_cpus": ALL, **ON_CPU}
    calls_host.start()("run", "calls_tasks:nested", inner, num_cpus=ALL, **ON_CPU)
    assert len(calls_host.trace("cores_granted")) == 1
    assert len(calls_host.trace("worker_finished", outcome="ok")) == 2


@pytest.mark.parametrize(("asked", "threads"), [(0.25, 1), (float(ALL), ALL)])
def test_a_call_has_as_many_threads_as_it_asks_for_cores(
    calls_host: CallsHost, asked: float, threads: int
) -> None:
    """Whatever a launcher has set for all clients, and whatever the load is."""
    caller = calls_host.start(FLOWER_GPU_CONCURRENCY="64")
    caller("run", "calls_tasks:seen", num_cpus=asked, **ON_CPU)
    [worker] = calls_host.trace("worker_started")
    assert worker["threads"] == threads


def test_more_cores_than_there_are_is_an_error_at_once(calls_host: CallsHost) -> None:
    with pytest.raises(CallError, match=f"num_cpus={ALL + 1} is too much: .* may use {ALL} core"):
        calls_host.start()("run", "calls_tasks:seen", num_cpus=ALL + 1, **ON_CPU)


def test_without_cpu_leases_nothing_is_counted(calls_host: CallsHost) -> None:
    caller = calls_host.start(FLOWER_GPU_CPU_LEASES="off")
    caller("run", "calls_tasks:seen", num_cpus=ALL, **ON_CPU)
    assert calls_host.events() == ["worker_started", "worker_finished"]
    assert not calls_host.trace("cores_granted")


def test_calls_wait_for_main_memory(calls_host: CallsHost) -> None:
    """The first is measured. With less than each of three needs, whatever others use, they run alone."""
    reserve = 2 * control_group.host_memory()[1]
    callers = [calls_host.start(FLOWER_GPU_HOST_RESERVE=str(reserve)) for _ in range(4)]
    steps: list[Any] = [["fill", 300, 0.5]]
    callers[0]("run", "calls_tasks:follow", steps, num_cpus=ALL / 16, **ON_CPU)
    for caller in callers[1:]:
        caller.tell("run", "calls_tasks:follow", steps, num_cpus=ALL / 16, **ON_CPU)
    for caller in callers[1:]:
        caller.answer()
    held: set[str] = set()
    most = 0
    for event in calls_host.trace("cores_granted", "cores_released"):
        (held.add if event["event"] == "cores_granted" else held.discard)(event["lease"])
        most = max(most, len(held))
    assert most == 1
    granted = calls_host.trace("cores_granted")
    assert len(granted) == 4 and granted[0]["host_memory_bytes"] is None
    assert all(one["host_memory_bytes"] is not None for one in granted[1:])
    assert all(one["memory_bytes"] >= 290 << 20 for one in calls_host.trace("worker_finished"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_mapped_files_are_no_memory_that_a_call_needs(
    calls_host: CallsHost, method: str, tmp_path: Path
) -> None:
    with (data := tmp_path / "data").open("wb") as file:
        file.truncate(300 << 20)
    steps: list[Any] = [["map", str(data)], ["fill", 100, 0.0]]
    calls_host.start()("run", "calls_tasks:follow", steps, gpu="never", start_method=method)
    [finished] = calls_host.trace("worker_finished")
    assert 90 << 20 <= finished["memory_bytes"] <= 250 << 20


@pytest.mark.parametrize(("gib", "expected"), [(2, 2), (8, 2), (16, 3), (64, 15)])
def test_few_calls_of_a_task_begin_before_one_is_measured(
    gib: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten workers of 4 GiB would end a host of 16."""
    monkeypatch.setattr(control_group, "available_memory", lambda: (0, gib << 30))
    footprints = Footprints(tmp_path / "footprints.json")

    def needs(task: str) -> tuple[HostNeed, ...]:
        memory = host.CallMemory(footprints, Key(task, "", ""), on_gpu=False, reserve_bytes=None).need()
        assert memory is not None
        return (HostNeed(CORES, 1, 1), memory)

    claims = [Claim(str(order), order, (), 0, host_needs=needs("train")) for order in range(30)]
    claims += [Claim(str(order), order, (), 0, host_needs=needs("other")) for order in range(30, 31)]
    cards = {need.resource: need.capacity for claim in claims for need in claim.host_needs}
    cards |= {CORES: 1000, MEMORY: gib << 30}
    granted = plan([Card(*card) for card in cards.items()], [], claims)
    assert len(granted) == expected + 1 and "30" in granted
