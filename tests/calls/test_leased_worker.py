"""Real workers with a lease: their cap, read back from the settings, and the memory use that they report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import Host
from phases import without_phases
from torch_version import needs_told_settings

from flower_gpu.calls import grants
from flower_gpu.errors import WorkerError
from flower_gpu.frameworks import pytorch
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.workers import caller as worker
from flower_gpu.workers.call import Call

sys.path.insert(0, str(Path(__file__).parent))  # workers get the caller's sys.path

import leased_tasks

GIB = 2**30
FRACTION = "per_process_memory_fraction:0.250000000000"

pytestmark = pytest.mark.timeout(300)

METHODS = ["spawn", "fork", "forkserver"]


def lease(uuid: str = "GPU-7f3a", ticket: str = "", cap_bytes: int = 4 * GIB) -> Lease:
    share = Share(uuid, 0, "A GPU", 16 * GIB, cap_bytes + GIB // 2, cap_bytes)
    return Lease("ab12", (share,), ticket=ticket)


def worker_env(**user: str) -> dict[str, str]:
    return {**user, **grants.of_lease(lease(), {**os.environ, **user})}


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (pytorch.SETTINGS, pytorch.OLD_SETTINGS):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Result:
    value: Any
    events: list[dict[str, Any]]

    def event(self, name: str) -> dict[str, Any]:
        (match,) = (event for event in self.events if event["event"] == name)
        return match


def call(task: str, method: str, env: dict[str, str], *args: Any, preload: tuple[Any, ...] = ()) -> Result:
    """Run a task in a worker that is set up for a lease. Return its value or error, and its events."""
    events: list[dict[str, Any]] = []
    prepared = Call(f"leased_tasks:{task}", args, {}, env=env, setup=grants.SETUP, preload=preload)
    try:
        value = worker.run(prepared, method, timeout_s=280, on_event=without_phases(events))
    except WorkerError:
        raise
    except Exception as error:
        value = error
    return Result(value, events)


@needs_told_settings
def test_each_worker_reads_its_own_settings_although_the_fork_server_has_read_others() -> None:
    preload = (("leased_tasks:read_settings", {}),)
    values = []
    for cap_bytes in (4 * GIB, 2 * GIB):
        env = grants.of_lease(lease(cap_bytes=cap_bytes), os.environ)
        values.append(call("settings_and_their_reader", "forkserver", env, preload=preload).value)
    reader = values[0][0]
    assert values == [
        (reader, FRACTION, FRACTION),
        (reader, FRACTION, "per_process_memory_fraction:0.125000000000"),
    ]


@needs_told_settings
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_settings_of_a_module_apply_together_with_the_cap(method: str) -> None:
    settings, in_force, environ = call("settings_of_its_own", method, worker_env()).value
    assert settings == environ == f"expandable_segments:True,{FRACTION}"
    assert in_force == [4 * GIB]


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_without_a_lease_starts_no_thread_and_reports_nothing(method: str) -> None:
    result = call("threads_and_torch", method, grants.of_lease(None, {}))
    assert "flower-gpu-memory" not in result.value[0]
    assert [event for event in result.events if event["event"] != "result"] == []


def test_torch_is_not_imported_for_a_task_that_does_not_need_it() -> None:
    result = call("threads_and_torch", "spawn", worker_env())
    names, has_torch = result.value
    assert "flower-gpu-memory" in names
    assert not has_torch
    assert result.event("gpu_memory")["gpus"] == [
        {
            "uuid": "GPU-7f3a",
            # There is no driver here, so the peak is unknown.
            "peak_bytes": None,
            "reserved_peak_bytes": None,
            "allocated_peak_bytes": None,
            "reserved_before_bytes": 0,
            "alloc_retries": None,
            "context_bytes": None,
            "outside_bytes": None,
            "told_by_driver": None,
            "lease_bytes": 4 * GIB + GIB // 2,
            "cap_bytes": 4 * GIB,
            "cap_in_force_bytes": None,
        }
    ]


@pytest.mark.parametrize("broken", ["", "figures", "lacks"])
def test_out_of_memory_is_reported_with_its_numbers(broken: str, capfd: pytest.CaptureFixture[str]) -> None:
    """This also works if a query of the framework fails. The worker's log then has the error."""
    text = "CUDA out of memory. Tried to allocate 6.00 GiB."
    result = call("run_out_of_memory", "forkserver", worker_env(), text, broken)
    assert repr(result.value) == "ValueError('the training failed')"
    is_logged = "CUDA error: an illegal memory access" in capfd.readouterr().err
    assert is_logged is (broken != "")
    # The event is sent all the same.
    if broken == "figures":
        assert result.event("gpu_memory")["gpus"]
    event = result.event("out_of_memory")
    assert event["asked_bytes"] == 6 * GIB
    assert event["uuid"] == "GPU-7f3a"
    # Without a driver, used and free memory are unknown.
    assert event["kind"] == "unclear"


@pytest.fixture
def on_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a worker on a host with stub GPUs. Return its result, and the report in its ticket at the end."""
    host = Host(tmp_path / "host")
    for name, value in host.env.items():
        monkeypatch.setenv(name, value)
    ticket = tmp_path / "ticket"
    ticket.touch()

    def run(*arguments: Any, **fields: Any) -> tuple[Result, dict[str, Any]]:
        host.set(0, **fields)
        env = grants.of_lease(lease(host.uuids[0], str(ticket)), os.environ)
        result = call("use_stub_gpu", "spawn", env, host.uuids[0], *arguments)
        return result, leased_tasks.reported(ticket)

    return run


def test_the_memory_use_of_a_running_worker_is_in_its_ticket(on_stub: Callable[..., Any]) -> None:
    result, final_report = on_stub(5 * GIB, 3 * GIB)
    report, pid = result.value
    assert report["pid"] == final_report["pid"] == pid
    assert list(report["used"].values()) == [5 * GIB]
    assert list(final_report["used"].values()) == [3 * GIB]
    assert result.event("gpu_memory")["gpus"][0]["peak_bytes"] == 5 * GIB


def test_the_peak_of_a_short_task_is_measured_at_its_end(on_stub: Callable[..., Any]) -> None:
    """The task is shorter than the interval between two measurements."""
    result, _ = on_stub(0, 3 * GIB)
    assert result.event("gpu_memory")["gpus"][0]["peak_bytes"] == 3 * GIB
    assert [event["event"] for event in result.events] == ["gpu_memory"]


@pytest.mark.parametrize(
    "fields",
    [{"unlisted": 1}, {"shift": 9_000_000}, {"hidden": 1}],
    ids=["container", "pids-of-the-host", "figures-hidden"],
)
def test_memory_that_the_driver_does_not_report_is_unknown_rather_than_zero(
    on_stub: Callable[..., Any], fields: dict[str, Any]
) -> None:
    result, final_report = on_stub(0, 3 * GIB, **fields)
    (gpu,) = result.event("gpu_memory")["gpus"]
    assert (gpu["peak_bytes"], gpu["told_by_driver"]) == (None, False)
    # The ticket has no report, or only that of an early measurement, when no memory was used yet.
    assert final_report.get("used", {}) in ({}, dict.fromkeys(final_report.get("used", {}), 0))


def test_a_worker_that_uses_no_memory_is_reported_with_zero(on_stub: Callable[..., Any]) -> None:
    result, final_report = on_stub(0, 0)
    (gpu,) = result.event("gpu_memory")["gpus"]
    assert (gpu["peak_bytes"], gpu["told_by_driver"]) == (0, True)
    assert list(final_report["used"].values()) == [0]


def test_out_of_memory_of_another_framework_is_reported_with_the_drivers_numbers(
    on_stub: Callable[..., Any],
) -> None:
    result, _ = on_stub(0, 3 * GIB, "CUDA error: out of memory: tried to allocate 2.00 GiB")
    assert str(result.value).startswith("CUDA error")
    event = result.event("out_of_memory")
    assert event["kind"] == "over_cap"
    assert (event["asked_bytes"], event["reserved_bytes"]) == (2 * GIB, 3 * GIB)
    assert (event["free_bytes"], event["total_bytes"]) == (13 * GIB, 16 * GIB)
