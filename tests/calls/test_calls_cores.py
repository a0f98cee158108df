"""Cores and main memory of calls, by real processes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calls_host import CallError, CallsHost

from flower_gpu import control_group
from flower_gpu.calls import leasing
from flower_gpu.calls.leasing import Leasing
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import LeaseTimeoutError
from flower_gpu.leases import host
from flower_gpu.leases.admission import CORES, MEMORY, Card, Claim, HostNeed, Part, plan
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import ON_CPU, Key
from flower_gpu.workers.threads import cores

pytestmark = pytest.mark.timeout(180)

ALL = cores()


WITHOUT_GPU = {"gpu": "never", "start_method": "fork"}


def test_calls_wait_for_cores_but_for_those_that_ask_for_nothing(calls_host: CallsHost) -> None:
    first, second, lone = (calls_host.start() for _ in range(3))
    first.tell("run", "calls_tasks:follow", [calls_host.wait("end")], num_cpus=ALL, **WITHOUT_GPU)
    calls_host.until(lambda state: state["holders"])
    assert lone("run", "calls_tasks:seen", **WITHOUT_GPU)["FLOWER_GPU_LEASE"] == ""
    second.tell("run", "calls_tasks:seen", num_cpus=0.5, **WITHOUT_GPU)
    calls_host.until_waiting(second)
    calls_host.go("end")
    first.answer()
    second.answer()
    granted = calls_host.trace("cores_granted")
    assert [one["cores"] for one in granted] == [ALL, 0.0, 0.5]
    assert granted[2]["waited_s"] > 0
    calls_host.until_free()


def test_a_call_within_a_call_has_the_cores_of_the_outer_one(calls_host: CallsHost) -> None:
    """With all of them leased, it would wait for its parent for ever."""
    inner = {"num_cpus": ALL, **WITHOUT_GPU}
    calls_host.start()("run", "calls_tasks:nested", inner, num_cpus=ALL, **WITHOUT_GPU)
    assert len(calls_host.trace("cores_granted")) == 1
    assert len(calls_host.trace("worker_finished", outcome="ok")) == 2


@pytest.mark.parametrize(("asked", "threads"), [(0.25, 1), (float(ALL), ALL)])
def test_a_call_has_as_many_threads_as_it_asks_for_cores(
    calls_host: CallsHost, asked: float, threads: int
) -> None:
    """Whatever a launcher has set for all clients, and whatever the load is."""
    caller = calls_host.start(FLOWER_GPU_CONCURRENCY="64")
    caller("run", "calls_tasks:seen", num_cpus=asked, **WITHOUT_GPU)
    [worker] = calls_host.trace("worker_started")
    assert worker["threads"] == threads


def test_more_cores_than_there_are_is_an_error_at_once(calls_host: CallsHost) -> None:
    with pytest.raises(CallError, match=f"num_cpus={ALL + 1} is too much: .* may use {ALL} core"):
        calls_host.start()("run", "calls_tasks:seen", num_cpus=ALL + 1, **WITHOUT_GPU)


def test_without_cpu_leases_nothing_is_counted(calls_host: CallsHost) -> None:
    caller = calls_host.start(FLOWER_GPU_CPU_LEASES="off")
    caller("run", "calls_tasks:seen", num_cpus=ALL, **WITHOUT_GPU)
    assert calls_host.events() == ["worker_started", "worker_finished"]
    assert not calls_host.trace("cores_granted")


def test_calls_wait_for_main_memory(calls_host: CallsHost) -> None:
    """The first is measured. With less than each of three needs, whatever others use, they run alone."""
    reserve = 2 * control_group.host_memory()[1]
    callers = [calls_host.start(FLOWER_GPU_HOST_RESERVE=str(reserve)) for _ in range(4)]
    steps: list[Any] = [["fill", 300, 0.5]]
    callers[0]("run", "calls_tasks:follow", steps, num_cpus=ALL / 16, **WITHOUT_GPU)
    for caller in callers[1:]:
        caller.tell("run", "calls_tasks:follow", steps, num_cpus=ALL / 16, **WITHOUT_GPU)
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
        memory = host.CallMemory(footprints, Key(task, "", ""), on_gpu=False, reserve_bytes=None)
        return (HostNeed(CORES, 1, 1), *memory.needs())

    claims = [Claim(str(order), order, (), 0, host_needs=needs("train")) for order in range(30)]
    claims += [Claim(str(order), order, (), 0, host_needs=needs("other")) for order in range(30, 31)]
    cards = {need.resource: need.capacity for claim in claims for need in claim.host_needs}
    cards |= {CORES: 1000, MEMORY: gib << 30}
    granted = plan([Card(*card) for card in cards.items()], [], claims)
    assert len(granted) == expected + 1 and "30" in granted


def test_a_call_that_asks_for_all_memory_is_alone_among_those_that_nobody_has_measured(
    tmp_path: Path,
) -> None:
    """The largest of the first calls of a task is killed, while the others go on."""
    footprints, key = Footprints(tmp_path / "footprints.json"), Key("train", "", "")

    def claim(order: int, *, asks_for_all: bool = False, **fields: Any) -> Claim:
        memory = host.CallMemory(footprints, key, False, None, asks_for_all)
        return Claim(str(order), order, (), 0, host_needs=memory.needs(), **fields)

    needed = claim(1).host_needs[0]
    cards = [Card(needed.resource, needed.capacity), Card(MEMORY, control_group.host_memory()[1])]
    others = [claim(1, parts=(Part(needed.resource, needed.amount, needed.capacity),))]
    footprints.learn(key.on(ON_CPU), 1 << 30)  # at least
    large, later = claim(2, asks_for_all=True), claim(3)
    assert plan(cards, others, [large, later]) == {}
    granted = plan(cards, [], [large, later])
    assert granted.keys() == {"2"}
    running = replace(large, parts=granted["2"])
    second = claim(4, asks_for_all=True)
    assert plan(cards, [running], [later, second]) == {}
    assert plan(cards, [], [later, second]).keys() == {"3"}, "first come, first served"


def test_a_wait_for_all_memory_has_a_limit_and_says_who_has_it(
    calls_host: CallsHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLOWER_GPU_LEDGER_DIR", calls_host.env["FLOWER_GPU_LEDGER_DIR"])
    monkeypatch.setattr(leasing, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    settings = call_settings({"gpu": "never"})
    assert settings.host.timeout_s == float("inf"), "calls wait for cores without a limit"
    first = Leasing(
        settings.gpu, (), "fit of client 1", Key("train", "", ""), {}, settings.host, asks_for_all_memory=True
    )
    with first.held_on_cpu() as held:
        assert held is not None
        second = replace(
            first,
            settings=replace(settings.gpu, lease_timeout_s=1.0),
            label="fit of client 2",
            key=Key("other", "", ""),
        )
        with (
            pytest.raises(LeaseTimeoutError, match="of main memory held by fit of client 1"),
            second.held_on_cpu(),
        ):
            pass
    assert "fit of client 2 is waiting for memory: " in caplog.text
    assert "are leased to fit of client 1 (pid" in caplog.text
