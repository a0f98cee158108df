"""Cores and main memory of calls, with real processes."""

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


def test_only_calls_that_request_cores_wait_for_them(calls_host: CallsHost) -> None:
    first, second, without_cores = (calls_host.start() for _ in range(3))
    first.send("follow", [calls_host.wait("end")], num_cpus=ALL, **WITHOUT_GPU)
    calls_host.until(lambda state: state["holders"])
    assert without_cores("run", "calls_tasks:seen", **WITHOUT_GPU)["FLOWER_GPU_LEASE"] == ""
    second.send("run", "calls_tasks:seen", num_cpus=0.5, **WITHOUT_GPU)
    calls_host.until_waiting(second)
    calls_host.go("end")
    first.answer()
    second.answer()
    granted = calls_host.trace("cores_granted")
    assert [event["cores"] for event in granted] == [ALL, 0.0, 0.5]
    assert granted[2]["waited_s"] > 0
    calls_host.until_free()


def test_a_nested_call_uses_the_cores_of_the_outer_call(calls_host: CallsHost) -> None:
    """The outer call holds all cores, so an inner call that asked for its own would wait forever."""
    inner = {"num_cpus": ALL, **WITHOUT_GPU}
    calls_host.start()("run", "calls_tasks:nested", inner, num_cpus=ALL, **WITHOUT_GPU)
    assert len(calls_host.trace("cores_granted")) == 1
    assert len(calls_host.trace("worker_finished", outcome="ok")) == 2


@pytest.mark.parametrize(("num_cpus", "threads"), [(0.25, 1), (float(ALL), ALL)])
def test_a_call_has_one_thread_for_each_requested_core(
    calls_host: CallsHost, num_cpus: float, threads: int
) -> None:
    """The number of threads depends neither on a launcher's setting for all clients nor on the load."""
    caller = calls_host.start(FLOWER_GPU_CONCURRENCY="64")
    caller("run", "calls_tasks:seen", num_cpus=num_cpus, **WITHOUT_GPU)
    [worker] = calls_host.trace("worker_started")
    assert worker["threads"] == threads


def test_a_request_for_more_cores_than_the_host_has_fails_at_once(calls_host: CallsHost) -> None:
    with pytest.raises(CallError, match=f"num_cpus={ALL + 1} is too much: .* may use {ALL} core"):
        calls_host.start()("run", "calls_tasks:seen", num_cpus=ALL + 1, **WITHOUT_GPU)


def test_without_cpu_leases_no_cores_are_leased(calls_host: CallsHost) -> None:
    caller = calls_host.start(FLOWER_GPU_CPU_LEASES="off")
    caller("run", "calls_tasks:seen", num_cpus=ALL, **WITHOUT_GPU)
    assert calls_host.events() == ["worker_started", "worker_finished"]
    assert not calls_host.trace("cores_granted")


def test_calls_wait_for_main_memory(calls_host: CallsHost) -> None:
    """The first call is measured. The reserve leaves less than the need of a call, so each one runs alone."""
    reserve = 2 * control_group.host_memory()[1]
    callers = [calls_host.start(FLOWER_GPU_HOST_RESERVE=str(reserve)) for _ in range(4)]
    steps: list[Any] = [["fill", 300, 0.5]]
    callers[0]("follow", steps, num_cpus=ALL / 16, **WITHOUT_GPU)
    for caller in callers[1:]:
        caller.send("follow", steps, num_cpus=ALL / 16, **WITHOUT_GPU)
    for caller in callers[1:]:
        caller.answer()
    held: set[str] = set()
    max_held = 0
    for event in calls_host.trace("cores_granted", "cores_released"):
        (held.add if event["event"] == "cores_granted" else held.discard)(event["lease"])
        max_held = max(max_held, len(held))
    assert max_held == 1
    granted = calls_host.trace("cores_granted")
    assert len(granted) == 4 and granted[0]["host_memory_bytes"] is None
    assert all(event["host_memory_bytes"] is not None for event in granted[1:])
    assert all(event["memory_bytes"] >= 290 << 20 for event in calls_host.trace("worker_finished"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_mapped_files_do_not_count_as_memory_of_a_call(
    calls_host: CallsHost, method: str, tmp_path: Path
) -> None:
    with (data := tmp_path / "data").open("wb") as file:
        file.truncate(300 << 20)
    steps: list[Any] = [["map", str(data)], ["fill", 100, 0.0]]
    calls_host.start()("follow", steps, gpu="never", start_method=method)
    [finished] = calls_host.trace("worker_finished")
    assert 90 << 20 <= finished["memory_bytes"] <= 250 << 20


@pytest.mark.parametrize(("gib", "expected"), [(2, 2), (8, 2), (16, 3), (64, 15)])
def test_few_calls_of_a_task_begin_before_the_first_measurement(
    gib: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten unmeasured workers of 4 GiB each would exhaust a host of 16 GiB."""
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


def test_a_call_that_asks_for_all_memory_excludes_other_unmeasured_calls(
    tmp_path: Path,
) -> None:
    """The kernel kills the largest of the first calls of a task, and the others continue."""
    footprints, key = Footprints(tmp_path / "footprints.json"), Key("train", "", "")

    def claim(order: int, *, asks_for_all: bool = False, **fields: Any) -> Claim:
        memory = host.CallMemory(footprints, key, False, None, asks_for_all)
        return Claim(str(order), order, (), 0, host_needs=memory.needs(), **fields)

    need = claim(1).host_needs[0]
    cards = [Card(need.resource, need.capacity), Card(MEMORY, control_group.host_memory()[1])]
    others = [claim(1, parts=(Part(need.resource, need.amount, need.capacity),))]
    # The killed call needed at least this much.
    footprints.learn(key.on(ON_CPU), 1 << 30)
    whole, later = claim(2, asks_for_all=True), claim(3)
    assert plan(cards, others, [whole, later]) == {}
    granted = plan(cards, [], [whole, later])
    assert granted.keys() == {"2"}
    running = replace(whole, parts=granted["2"])
    second = claim(4, asks_for_all=True)
    assert plan(cards, [running], [later, second]) == {}
    assert plan(cards, [], [later, second]).keys() == {"3"}, "the later claim was granted first"


def test_a_wait_for_all_memory_has_a_limit_and_names_the_holder(
    calls_host: CallsHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLOWER_GPU_LEDGER_DIR", calls_host.env["FLOWER_GPU_LEDGER_DIR"])
    monkeypatch.setattr(leasing, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    settings = call_settings({"gpu": "never"})
    assert settings.host.timeout_s == float("inf"), "the wait for cores has a limit"
    first = Leasing(
        settings.gpu, (), "fit of client 1", Key("train", "", ""), {}, settings.host, asks_for_all_memory=True
    )
    with first.hold_cores() as ticket:
        assert ticket is not None
        second = replace(
            first,
            settings=replace(settings.gpu, lease_timeout_s=1.0),
            label="fit of client 2",
            key=Key("other", "", ""),
        )
        with (
            pytest.raises(LeaseTimeoutError, match="of main memory held by fit of client 1"),
            second.hold_cores(),
        ):
            pass
    assert "fit of client 2 is waiting for memory: " in caplog.text
    assert "are leased to fit of client 1 (pid" in caplog.text
