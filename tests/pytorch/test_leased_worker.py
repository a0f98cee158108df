"""A worker with a lease: capped, watched, and what it tells. In real workers, by settings read back."""

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

from flower_gpu.calls import environment, leased_worker
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
    return {**user, **environment.of_worker(lease(), {**os.environ, **user})}


@pytest.fixture(autouse=True)
def settings_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (pytorch.SETTINGS, pytorch.OLD_SETTINGS):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Result:
    value: Any
    events: list[dict[str, Any]]

    def told(self, event: str) -> dict[str, Any]:
        (found,) = (sent for sent in self.events if sent["event"] == event)
        return found


def call(task: str, method: str, env: dict[str, str], *args: Any, preload: tuple[Any, ...] = ()) -> Result:
    """Run a task in a worker that is set up for its lease; return its result or error, and its events."""
    events: list[dict[str, Any]] = []
    prepared = Call(f"leased_tasks:{task}", args, {}, env=env, setup=leased_worker.SETUP, preload=preload)
    try:
        value = worker.run(prepared, method, timeout_s=280, on_event=without_phases(events))
    except WorkerError:
        raise
    except Exception as error:
        value = error
    return Result(value, events)


@needs_told_settings
def test_settings_that_the_fork_server_has_read_are_not_those_of_its_next_worker() -> None:
    preload = (("leased_tasks:read_settings", {}),)
    seen = []
    for cap_bytes in (4 * GIB, 2 * GIB):
        env = environment.of_worker(lease(cap_bytes=cap_bytes), os.environ)
        seen.append(call("settings_and_their_reader", "forkserver", env, preload=preload).value)
    reader = seen[0][0]
    assert seen == [
        (reader, FRACTION, FRACTION),
        (reader, FRACTION, "per_process_memory_fraction:0.125000000000"),
    ]


@needs_told_settings
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_module_sets_itself_holds_together_with_the_cap(method: str) -> None:
    settings, in_force, environ = call("settings_of_its_own", method, worker_env()).value
    assert settings == environ == f"expandable_segments:True,{FRACTION}"
    assert in_force == [4 * GIB]


@pytest.mark.parametrize("method", METHODS)
def test_without_a_lease_nothing_is_started_or_told(method: str) -> None:
    result = call("threads_and_torch", method, environment.of_worker(None, {}))
    assert "flower-gpu-memory" not in result.value[0]
    assert [event for event in result.events if event["event"] != "result"] == []


def test_a_task_without_torch_gets_none() -> None:
    result = call("threads_and_torch", "spawn", worker_env())
    names, has_torch = result.value
    assert "flower-gpu-memory" in names
    assert not has_torch
    assert result.told("gpu_memory")["gpus"] == [
        {
            "uuid": "GPU-7f3a",
            "peak_bytes": None,  # nobody can tell here
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
def test_out_of_memory_is_told_with_the_numbers(broken: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where a framework does not answer, which the worker's log says."""
    text = "CUDA out of memory. Tried to allocate 6.00 GiB."
    result = call("run_out_of_memory", "forkserver", worker_env(), text, broken)
    assert repr(result.value) == "ValueError('the training failed')"
    is_said = "CUDA error: an illegal memory access" in capfd.readouterr().err
    assert is_said is (broken != "")
    if broken == "figures":  # it has figures only where CUDA has started
        assert result.told("gpu_memory")["cuda"]
    told = result.told("out_of_memory")
    assert told["asked_bytes"] == 6 * GIB
    assert told["uuid"] == "GPU-7f3a"
    assert told["kind"] == "unclear"  # nobody tells how much is used and free


@pytest.fixture
def on_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a worker on a host with stub GPUs; return its result, events, and what its ticket says then."""
    host = Host(tmp_path / "host")
    for name, value in host.env.items():
        monkeypatch.setenv(name, value)
    ticket = tmp_path / "ticket"
    ticket.touch()

    def run(*arguments: Any, **fields: Any) -> tuple[Result, dict[str, Any]]:
        host.set(0, **fields)
        env = environment.of_worker(lease(host.uuids[0], str(ticket)), os.environ)
        result = call("use_stub_gpu", "spawn", env, host.uuids[0], *arguments)
        return result, leased_tasks.reported(ticket)

    return run


def test_what_a_worker_uses_is_in_its_ticket_while_it_runs(on_stub: Callable[..., Any]) -> None:
    result, at_the_end = on_stub(5 * GIB, 3 * GIB)
    seen, pid = result.value
    assert seen["pid"] == at_the_end["pid"] == pid
    assert list(seen["used"].values()) == [5 * GIB]
    assert list(at_the_end["used"].values()) == [3 * GIB]
    assert result.told("gpu_memory")["gpus"][0]["peak_bytes"] == 5 * GIB


def test_the_peak_of_a_short_task_is_seen_at_its_end(on_stub: Callable[..., Any]) -> None:
    """Shorter than the time between two looks."""
    result, _ = on_stub(0, 3 * GIB)
    assert result.told("gpu_memory")["gpus"][0]["peak_bytes"] == 3 * GIB
    assert [event["event"] for event in result.events] == ["gpu_memory"]


@pytest.mark.parametrize(
    "fields",
    [{"unlisted": 1}, {"shift": 9_000_000}, {"hidden": 1}],
    ids=["container", "pids-of-the-host", "figures-hidden"],
)
def test_what_the_driver_does_not_tell_is_unknown_and_not_nothing(
    on_stub: Callable[..., Any], fields: dict[str, Any]
) -> None:
    result, at_the_end = on_stub(0, 3 * GIB, **fields)
    (told,) = result.told("gpu_memory")["gpus"]
    assert (told["peak_bytes"], told["told_by_driver"]) == (None, False)
    # For others it has not told anything yet, but what an early look may have found: nothing is used.
    assert at_the_end.get("used", {}) in ({}, dict.fromkeys(at_the_end.get("used", {}), 0))


def test_a_worker_that_uses_nothing_is_known_to(on_stub: Callable[..., Any]) -> None:
    result, at_the_end = on_stub(0, 0)
    (told,) = result.told("gpu_memory")["gpus"]
    assert (told["peak_bytes"], told["told_by_driver"]) == (0, True)
    assert list(at_the_end["used"].values()) == [0]


def test_out_of_memory_of_another_framework_is_told_by_the_drivers_numbers(
    on_stub: Callable[..., Any],
) -> None:
    result, _ = on_stub(0, 3 * GIB, "CUDA error: out of memory: tried to allocate 2.00 GiB")
    assert str(result.value).startswith("CUDA error")
    told = result.told("out_of_memory")
    assert told["kind"] == "over_cap"
    assert (told["asked_bytes"], told["reserved_bytes"]) == (2 * GIB, 3 * GIB)
    assert (told["free_bytes"], told["total_bytes"]) == (13 * GIB, 16 * GIB)
