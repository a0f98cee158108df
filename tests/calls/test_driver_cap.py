"""Workers that the driver caps, each in its own real control group, on stand-ins for NVML and CUDA."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_stub
import host_tasks
import pytest
from capped_calls import CALLER, SPAWNED, CallsInGroup, calls_in_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvml_stub import GIB, NO_PERMISSION
from properties import examples

from flower_gpu import control_group

MIB = 2**20
OUT_OF_MEMORY = host_tasks.OUT_OF_MEMORY

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def host(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> Iterator[CallsInGroup]:
    with calls_in_group(cuda_host(gpus=1, driver="615.20.01"), tmp_path) as host:
        yield host


def test_direct_allocations_are_limited_to_the_lease(host: CallsInGroup) -> None:
    """The cap also holds for code that catches CUDA's error and then asks for less."""
    capped, enough = host.calls(
        ("allocate", [2 * GIB, GIB, 256 * MIB], SPAWNED),
        ("allocate", [2 * GIB, GIB, 256 * MIB], SPAWNED | {"gpu_memory": "4GiB"}),
    )
    # The context also counts, so 1 GiB is too much after 2 of 3 GiB.
    assert capped == [0, OUT_OF_MEMORY, 0]
    assert enough == [0, 0, 0]
    assert [event["cap"] for event in host.events("worker_started")] == ["driver", "driver"]
    assert (host.remaining_groups(), host.reserved()) == ([], 0)
    assert host.calls(("allocate", [8 * GIB], SPAWNED), FLOWER_GPU_CAP="allocator") == [[0]]
    assert [event["cap"] for event in host.events("worker_started")][2:] == ["allocator"]


def test_the_footprint_is_the_use_of_the_control_group(host: CallsInGroup) -> None:
    """The code has no footprint yet, and the driver lists no process."""
    host.gpus.set(0, unlisted=1)
    [group] = host.calls(("allocate_and_wait", [5 * GIB, 1.0], SPAWNED | {"gpu_memory": "6GiB"}))
    assert "flower-gpu-" in group
    [finished] = host.events("worker_finished")
    [gpu] = finished["gpus"]
    assert gpu["told_by_driver"] and 5 * GIB <= gpu["peak_bytes"] <= 6 * GIB


def test_a_call_that_reaches_its_cap_is_retried_with_more(host: CallsInGroup) -> None:
    [result] = host.calls(("fail_beyond", [4 * GIB], SPAWNED | {"on_oom": "retry"}))
    assert result is None, result
    sizes = [event["gpus"][0]["memory_bytes"] for event in host.events("lease_granted")]
    assert len(sizes) == 2 and sizes[0] == 3 * GIB < sizes[1]


def test_without_the_drivers_cap_calls_run_unless_it_is_required(host: CallsInGroup) -> None:
    """By default, the caps of the frameworks remain. A call that requires the driver's cap fails."""
    host.gpus.fail("nvmlDeviceSetMemoryLimits_v1", NO_PERMISSION)
    assert host.calls(("allocate", [GIB], SPAWNED)) == [[0]]
    [[kind, text]] = host.calls(("allocate", [GIB], SPAWNED), FLOWER_GPU_CAP="driver")
    assert kind == "GPUUnavailableError" and "--gpu-cap driver" in text and "root may" in text
    host.gpus.fail("nvmlDeviceSetMemoryLimits_v1", None)
    in_process = {**SPAWNED, "start_method": "in-process"}
    [[kind, text]] = host.calls(("allocate", [GIB], in_process), FLOWER_GPU_CAP="driver")
    assert kind == "GPUUnavailableError" and "no worker of its own" in text
    assert (host.remaining_groups(), host.reserved()) == ([], 0)
    output = host.run(sys.executable, "-m", "flower_gpu.cli", "doctor", FLOWER_GPU_POLICY="never")
    assert "GPU cap: by the driver" in output


def test_groups_of_dead_workers_and_callers_are_removed(host: CallsInGroup) -> None:
    [died] = host.calls(("kill_itself", [], SPAWNED))
    assert died[0] == "WorkerDiedError" and host.remaining_groups() == []
    script = [sys.executable, "-c", CALLER, str(Path(__file__).parent)]
    calls = [("allocate_and_wait", [GIB, 600.0], SPAWNED)]
    with host.start(*script, json.dumps(calls)) as caller:
        for _ in range(600):
            if host.reserved() == 3 * GIB:
                break
            signal.sigtimedwait([], 0.1)
        assert host.reserved() == 3 * GIB and len(host.remaining_groups()) == 1
        caller.kill()
    for _ in range(100):
        if not any((host.group / name / "cgroup.procs").read_text() for name in host.remaining_groups()):
            break
        signal.sigtimedwait([], 0.1)
    assert host.calls(("allocate", [GIB], SPAWNED)) == [[0]]
    assert (host.remaining_groups(), host.reserved()) == ([], 0)


def test_a_limit_set_by_another_program_bounds_all_leases(host: CallsInGroup) -> None:
    """Kubernetes or Slurm may have set the limit. The ledger then leases the limit and not the whole GPU."""
    code = f"""
from pathlib import Path
from flower_gpu.gpu import inventory
uuid = inventory.take().gpus[0].uuid
inventory.set_limits(Path({str(host.group)!r}), {{uuid: 10 << 30}})
"""
    host.run(sys.executable, "-c", code)
    [gpu] = json.loads(host.run(sys.executable, "-m", "flower_gpu.cli", "gpus", "--json"))["gpus"]
    assert (gpu["total_bytes"], gpu["limited_by"]) == (10 * GIB, str(host.group))
    assert str(host.group) in host.run(sys.executable, "-m", "flower_gpu.cli", "gpus").replace("\n", "")
    fits, too_much = host.calls(
        ("allocate", [GIB], SPAWNED | {"gpu_memory": "9GiB"}),
        ("allocate", [GIB], SPAWNED | {"gpu_memory": "11GiB"}),
    )
    assert fits == [0]
    assert too_much[0] == "LeaseError" and "has 9.8 GiB for leases" in too_much[1]


# The steps of a worker to its cap. The worker of a test kills itself after one of them, or stays alive.
STEPS = ("mkdir", "lock", "limit", "join", "stay")
WORKER = """
import os, signal, sys
from pathlib import Path
from flower_gpu.calls.grants import driver_cap
from flower_gpu.gpu import inventory
last, uuid = sys.argv[1:]

def then_die(step, function):
    def done(*arguments, **options):
        result = function(*arguments, **options)
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return done

Path.mkdir = then_die("mkdir", Path.mkdir)
driver_cap._lock = then_die("lock", driver_cap._lock)
driver_cap._limit = then_die("limit", driver_cap._limit)
Path.write_text = then_die("join", Path.write_text)
driver_cap.join({uuid: 1 << 30})
print("there", flush=True)
sys.stdin.read()
"""
SWEEP = """
import sys
from pathlib import Path
from flower_gpu.calls.grants import driver_cap
driver_cap.register(Path(sys.argv[1], "one"), ())
driver_cap.remove_stale()
"""


@given(last_steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=3))
@settings(
    max_examples=examples(6),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_kill_at_any_step_leaves_no_group(host: CallsInGroup, last_steps: list[str]) -> None:
    uuid = host.gpus.uuids[0]
    workers = []
    for last_step in last_steps:
        env = {**host.env, "IN": str(host.group)}
        command = ["sh", "-c", 'echo $$ > "$IN/cgroup.procs" && exec "$@"', "sh"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append(
            subprocess.Popen([*command, sys.executable, "-c", WORKER, last_step, uuid], env=env, **pipes)
        )
    living = 0
    for worker, last_step in zip(workers, last_steps, strict=True):
        assert worker.stdout is not None
        is_alive = worker.stdout.readline() == "there\n"
        assert is_alive == (last_step == "stay")
        living += is_alive
        if not is_alive:
            worker.wait(60)
    host.run(sys.executable, "-c", SWEEP, str(host.group))
    assert len(host.remaining_groups()) == living and host.reserved() == living * GIB
    for worker in workers:
        worker.communicate()
    host.run(sys.executable, "-c", SWEEP, str(host.group))
    assert (host.remaining_groups(), host.reserved()) == ([], 0)


_WORKERS_OF_OTHER_THREADS = """
import sys
from flower_gpu import control_group
from flower_gpu.calls.grants import driver_cap

root = control_group.unified()[-1]
count = 0
def note(event, args):  # another worker registers its group while the groups in one folder are listed
    global count
    if event in ("os.listdir", "os.scandir") and count < 3:
        count += 1
        driver_cap.register(root / f"place-{count}" / "worker", ())
driver_cap.register(root / "worker", ())
sys.addaudithook(note)
driver_cap.remove_stale()
print(count)
"""


@pytest.mark.skipif(not control_group.unified(), reason="no control groups of version 2")
def test_groups_registered_meanwhile_cause_no_error(run_script: Any) -> None:
    assert int(run_script(_WORKERS_OF_OTHER_THREADS).stdout) > 0
