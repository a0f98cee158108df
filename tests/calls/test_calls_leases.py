"""Each call has a lease. It is granted before the worker starts and released when worker and caller end."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from calls_host import GIB, METHODS, CallsHost, is_gone, value_of
from torch_version import with_cap
from waiting import until


@pytest.mark.parametrize("method", [*METHODS, "spawn", "in-process"])
def test_a_worker_sees_its_lease_and_holds_it_while_it_lives(calls_host: CallsHost, method: str) -> None:
    caller = calls_host.start()
    steps = [calls_host.announce("here"), calls_host.wait("go")]
    caller.send("follow", steps, start_method=method, gpu_memory="4GiB", name="7")
    pid = calls_host.wait_until_reached("here")
    [holder] = calls_host.holders()
    assert holder["pid"] == caller.pid
    assert holder["parts"] == {calls_host.uuid: 4 * GIB}
    assert holder["label"] == "calls_tasks:follow of client 7"
    calls_host.go("go")
    result = caller.answer()
    assert calls_host.holders() == []
    assert result["pid"] == pid
    assert (pid == caller.pid) == (method == "in-process")
    assert result["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
    lease = json.loads(result["FLOWER_GPU_LEASE"])
    [share] = lease["shares"]
    expected = {"uuid": calls_host.uuid, "memory_bytes": 4 * GIB, "total_bytes": 16 * GIB}
    assert expected.items() <= share.items()
    assert share["cap_bytes"] == 4 * GIB - (512 << 20)
    assert result["PYTORCH_ALLOC_CONF"] == with_cap("0.218750000000")
    assert calls_host.events() == ["lease_granted", "worker_started", "worker_finished", "lease_released"]
    for event in [line for line in calls_host.trace() if "lease" in line]:
        assert (event["lease"], event["client"], event["task"]) == (lease["id"], "7", "calls_tasks:follow")
    # The caller has none of these variables, even after a call in its own process.
    after_call = caller("seen")
    assert [after_call[name] for name in after_call if name != "pid"] == [None, None, None]


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_caller_frees_its_lease(calls_host: CallsHost, method: str) -> None:
    caller = calls_host.start()
    steps = [
        ["child", str(calls_host.folder / "child")],
        calls_host.announce("here"),
        calls_host.wait("never"),
    ]
    caller.send("follow", steps, start_method=method)
    pids = [calls_host.wait_until_reached("here"), calls_host.wait_until_reached("child")]
    assert len(calls_host.holders()) == 1
    caller.kill()
    calls_host.until_free()
    # The lease is held as long as any of these processes lives.
    assert all(is_gone(pid) for pid in pids)
    assert calls_host.start().follow()["CUDA_VISIBLE_DEVICES"] == calls_host.uuid


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_worker_frees_its_lease(calls_host: CallsHost, method: str) -> None:
    """Forks of the worker hold the lease until they end. A program that it started does not hold it."""
    caller = calls_host.start()
    steps = [
        ["child", str(calls_host.folder / "child")],
        ["child", str(calls_host.folder / "exec")],
        calls_host.announce("here"),
        calls_host.wait("never"),
    ]
    caller.send("follow", steps, start_method=method, gpu_memory="2GiB")
    pids = [calls_host.wait_until_reached(name) for name in ("here", "child", "exec")]
    os.kill(pids[0], signal.SIGKILL)
    error = caller.failure()
    assert error.name == "WorkerDiedError" and "SIGKILL" in error.text
    assert calls_host.holders() == []
    *forks, program = pids
    assert all(is_gone(pid) for pid in forks)
    until(lambda: is_gone(program), "the end of the program")
    [finished] = calls_host.trace("worker_finished")
    assert finished["outcome"] == "died"
    assert calls_host.trace("out_of_memory") == []
    assert calls_host.events()[-1] == "lease_released"


def test_the_timeout_of_a_call_starts_with_its_lease(calls_host: CallsHost) -> None:
    first, second = calls_host.start(), calls_host.start()
    steps = [calls_host.announce("here"), calls_host.wait("go")]
    first.send("follow", steps, gpu_memory="10GiB", start_method="fork")
    calls_host.wait_until_reached("here")
    second.send("follow", [["sleep", 0.5]], gpu_memory="10GiB", start_method="fork", timeout_s=8)
    calls_host.until_waiting(second)
    waiting = calls_host.start()
    # This wait is longer than the timeout_s of the second call.
    waiting.fails("run", "calls_tasks:seen", gpu_memory="10GiB", lease_timeout_s=9)
    calls_host.go("go")
    first.answer()
    second.answer()
    *_, granted = calls_host.trace("lease_granted")
    assert granted["waited_s"] > 8


def test_a_lease_timeout_names_the_holder(calls_host: CallsHost) -> None:
    first, second = calls_host.start(), calls_host.start()
    steps = [calls_host.announce("here"), calls_host.wait("go")]
    first.send("follow", steps, gpu_memory="10GiB", name="4", start_method="fork")
    calls_host.wait_until_reached("here")
    error = second.fails(
        "run", "calls_tasks:seen", gpu_memory="8GiB", name="5", lease_timeout_s=0.3, start_method="fork"
    )
    assert error.name == "LeaseTimeoutError"
    assert {"GPUError", "TimeoutError"} <= set(error.names)
    assert "calls_tasks:seen of client 5: no lease within lease_timeout_s=0.3" in error.text
    assert f"10.0 GiB held by calls_tasks:follow of client 4 (pid {first.pid})" in error.text
    assert len(calls_host.holders()) == 1 and calls_host.status()["waiting"] == []
    assert len(calls_host.trace("worker_started")) == 1
    calls_host.go("go")
    first.answer()


def test_a_request_that_no_gpu_can_meet_fails_at_once(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    for options, message in (
        ({"gpu_memory": "20GiB"}, "asks for 20.0 GiB of one GPU, more than any GPU has"),
        ({"num_gpus": 3}, "asks for 3 GPUs and may use 1"),
        ({"num_gpus": 0.01}, "too little for CUDA itself"),
    ):
        error = caller.fails("run", "calls_tasks:seen", **options)
        assert error.name == "LeaseError" and message in error.text
    # This is less than a CUDA context needs.
    error = caller.fails("run", "calls_tasks:seen", gpu_memory="300MiB")
    assert error.name == "ConfigError"
    assert "asks for 300 MiB of GPU 0" in error.text and "512 MiB" in error.text
    assert calls_host.trace("lease_granted", "worker_started") == []
    assert list(calls_host.ledger.glob("*/*.ticket")) == []


def test_a_call_without_a_computable_cap_fails(calls_host: CallsHost) -> None:
    """The caps of JAX and PyTorch are fractions of the GPU's memory, which is unknown for a lost GPU."""
    caller = calls_host.start()
    caller("lose_gpu_once_granted")
    error = caller.fails("run", "calls_tasks:seen", start_method="fork", name="6")
    assert error.name == "GPUUnavailableError"
    assert "seen of client 6 was not started: it has a lease on GPU 0 (NVIDIA Stub 16GB), but" in error.text
    assert "it is lost" in error.text and "flower-gpu gpus" in error.text
    assert [event["reason"] for event in calls_host.trace("lease_not_granted")] == [error.name]
    assert calls_host.trace("worker_started") == []
    calls_host.stub.set(0, lost=False)
    assert calls_host.holders() == []
    assert calls_host.start().follow(start_method="fork")["CUDA_VISIBLE_DEVICES"] == calls_host.uuid


@pytest.mark.parametrize("fields", [{"unlisted": 1}, {"shift": 9_000_000}], ids=["container", "host-pids"])
def test_unlisted_memory_use_is_not_learned(calls_host: CallsHost, fields: Any) -> None:
    """A use of 0 was once learned as the size of a context, so the next calls ran out of memory."""
    calls_host.stub.set(0, **fields)
    caller = calls_host.start()
    for _ in range(2):
        caller.follow(["allocate", 3.0], start_method="fork")
    assert caller("footprints") == []
    assert calls_host.granted() == [0.0, 0.0]
    assert calls_host.trace("out_of_memory") == []
    [line] = caller("lines")
    assert "does not report how much memory a process uses on GPU 0 (NVIDIA Stub 16GB)" in line
    assert "num_gpus or gpu_memory" in line
    caller.follow(["allocate", 3.0], start_method="fork", gpu_memory="4GiB")
    assert caller("lines") == []
    calls_host.stub.set(0, **dict.fromkeys(fields))
    caller.follow(["allocate", 3.0], start_method="fork")
    assert [peak for *_, peak in caller("footprints")] == [int(3.5 * GIB)]


@pytest.mark.parametrize(("placement", "gpus"), [("spread", 2), ("pack", 1)])
def test_placement_follows_the_environment(calls_host: CallsHost, placement: str, gpus: int) -> None:
    calls_host.add_gpu()
    steps = [calls_host.wait("go")]
    callers = [calls_host.start(FLOWER_GPU_PLACEMENT=placement, FLOWER_GPU_MEMORY="4GiB") for _ in range(2)]
    for number, caller in enumerate(callers, start=1):
        caller.send("follow", steps, start_method="fork")
        calls_host.until(lambda state, number=number: len(state["holders"]) == number)
    assert len({uuid for holder in calls_host.holders() for uuid in holder["parts"]}) == gpus
    calls_host.go("go")
    assert len({caller.answer()["CUDA_VISIBLE_DEVICES"] for caller in callers}) == gpus


@pytest.mark.parametrize(("gpu", "method"), [("never", "forkserver"), ("offer", "fork"), ("offer", "spawn")])
def test_variables_set_by_a_module_or_task_change_nothing(
    calls_host: CallsHost, method: str, gpu: str
) -> None:
    """Scripts for one GPU set such variables. A hidden GPU stays hidden, and a worker keeps its own GPU."""
    task = "calls_sets_variables:seen"
    result = calls_host.start()("run", task, start_method=method, gpu=gpu, gpu_memory="4GiB")
    if gpu == "never":
        assert (result["CUDA_VISIBLE_DEVICES"], result["FLOWER_GPU_LEASE"]) == ("", "")
        assert calls_host.events() == ["worker_started", "worker_finished"]
    else:
        assert result["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
        for variables in (result["cleared"], result["patched"]):
            assert variables["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
            assert "FLOWER_GPU_LEASE" in variables and "PATH" not in variables
        assert "OWN" in result["patched"] and "OWN" not in result["cleared"]
        assert result["PYTORCH_ALLOC_CONF"] == with_cap("0.218750000000", "expandable_segments:True")


def test_a_call_gets_only_gpus_visible_in_its_environment(calls_host: CallsHost) -> None:
    other = calls_host.add_gpu()
    first, caller = calls_host.start(), calls_host.start()
    first.send("follow", [calls_host.wait("go")], num_gpus=1, env={"CUDA_VISIBLE_DEVICES": "1"})
    calls_host.until(lambda state: [list(holder["parts"]) for holder in state["holders"]] == [[other]])
    error = caller.fails(
        "run", "calls_tasks:seen", num_gpus=1, env={"CUDA_VISIBLE_DEVICES": "1"}, lease_timeout_s=0.2
    )
    assert error.name == "LeaseTimeoutError"
    calls_host.go("go")
    assert first.answer()["CUDA_VISIBLE_DEVICES"] == other
    result = caller.follow(num_gpus=1, env={"CUDA_VISIBLE_DEVICES": "1"}, start_method="fork")
    assert result["CUDA_VISIBLE_DEVICES"] == other
    caller("environment", {"CUDA_VISIBLE_DEVICES": ""})
    result = caller.follow(num_gpus=1, start_method="fork")
    assert (result["CUDA_VISIBLE_DEVICES"], result["FLOWER_GPU_LEASE"]) == ("", "")
    error = caller.fails("run", "calls_tasks:seen", gpu="require")
    assert error.name == "GPUUnavailableError"
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in error.text
    assert caller.follow(gpu="offer", env={"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] != ""


def test_the_node_decides_about_requests_of_the_server(calls_host: CallsHost) -> None:
    other = calls_host.add_gpu()
    caller = calls_host.start()

    def visible(*configs: dict[str, Any], **options: Any) -> str:
        metrics = caller("fit", *configs, start_method="fork", gpu_memory="2GiB", **options)
        assert metrics["leased"] == bool(metrics["visible"])
        result: str = metrics["visible"]
        return result

    assert visible({}) in (calls_host.uuid, other)
    assert visible({"use-gpu": False}) == ""
    assert visible({}, {}, {"use-gpu": False}) == ""
    assert visible({"use-gpu": True}, {"gpu-ids": 1}, {"use-gpu": False}) == other
    assert visible({"use-gpu": True}, {"gpu": "never"}) == ""
    assert visible({"use-gpu": False}, {"gpu": "force", "gpu-ids": "0"}) == calls_host.uuid
    assert visible({}, {"gpu": "never"}, gpu="force") == ""
    assert visible({}, {"gpu-ids": 7}) in (calls_host.uuid, other)
    logged = caller("lines")
    assert len([line for line in logged if "policy is never" in line]) == 1
    assert len([line for line in logged if "there is no GPU 7" in line]) == 1
    error = caller.fails("fit", {}, {"gpu": "require", "gpu-ids": 7})
    assert error.name == "GPUUnavailableError" and "there is no GPU 7" in error.text
    error = caller.fails("fit", {"use-gpu": "yes"})
    assert error.name == "ConfigError" and "use-gpu in the config of the call" in error.text
    assert calls_host.holders() == []


def test_a_missing_forced_gpu_is_reported_once(calls_host: CallsHost) -> None:
    calls_host.stub.set(0, lost=True)
    caller = calls_host.start()
    for _ in range(2):
        assert caller.follow(gpu="force", start_method="fork")["CUDA_VISIBLE_DEVICES"] == ""
    [line] = caller("lines")
    assert line.startswith("ERROR this node's policy is force, but no GPU can be used")
    error = caller.fails("run", "calls_tasks:seen", gpu="require")
    assert error.name == "GPUUnavailableError"
    calls_host.stub.set(0, lost=False)
    assert caller.follow(gpu="require", start_method="fork")["CUDA_VISIBLE_DEVICES"] == calls_host.uuid


@pytest.mark.parametrize("method", METHODS)
def test_a_nested_call_uses_the_lease_of_the_outer_call(calls_host: CallsHost, method: str) -> None:
    """The outer call holds the whole GPU, so an inner call with its own lease would wait forever."""
    inner = {"start_method": method, "lease_timeout_s": 5, "env": {"CUDA_VISIBLE_DEVICES": "0"}}
    result = calls_host.start()("run", "calls_tasks:nested", inner, num_gpus=1, start_method=method)
    outer, nested = result
    assert outer.pop("pid") != nested.pop("pid")
    assert outer == nested
    assert outer["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
    assert len(calls_host.trace("lease_granted")) == 1


def test_a_nested_call_without_a_gpu_gets_no_lease(calls_host: CallsHost) -> None:
    inner = {"start_method": "fork", "gpu": "force", "env": {"CUDA_VISIBLE_DEVICES": "0"}}
    _, nested = calls_host.start()("run", "calls_tasks:nested", inner, gpu="never", start_method="fork")
    assert (nested["CUDA_VISIBLE_DEVICES"], nested["FLOWER_GPU_LEASE"]) == ("", "")
    assert calls_host.trace("lease_granted") == []


def test_threads_of_a_process_have_separate_leases_and_take_turns(calls_host: CallsHost) -> None:
    """A fork made by one thread does not keep the lease of another."""
    call = ["calls_tasks:follow", [[["sleep", 0.1]]], {"start_method": "fork", "gpu_memory": "10GiB"}]
    for reply in calls_host.start()("run_in_threads", call, call, call):
        value_of(reply)
    events = calls_host.trace("lease_granted", "worker_finished")
    assert [event["event"] for event in events] == ["lease_granted", "worker_finished"] * 3
    assert len({event["lease"] for event in events}) == 3
    assert calls_host.holders() == []


def test_a_preloaded_task_has_a_lease(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    options = {"preload": "calls_tasks:prepare", "start_method": "forkserver", "gpu_memory": "2GiB"}
    first, second = (caller("run", "calls_tasks:prepared", **options) for _ in range(2))
    assert first["prepared_by"] == second["prepared_by"] and len(first["prepared_by"]) == 1
    assert first["pid"] not in first["prepared_by"]
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
    assert json.loads(first["FLOWER_GPU_LEASE"])["id"] != json.loads(second["FLOWER_GPU_LEASE"])["id"]
    assert calls_host.holders() == []


def test_evaluation_on_the_server_takes_a_lease(calls_host: CallsHost) -> None:
    loss, metrics = calls_host.start()("evaluate", start_method="fork", gpu_memory="3GiB")
    assert (loss, metrics["leased"]) == (1.0, 1.0)
    assert calls_host.events(client="server", task="evaluate") == [
        "lease_granted", "worker_started", "worker_finished", "lease_released"
    ]  # fmt: skip
    assert calls_host.granted() == [3.0]


_INTERRUPTED = """
from flower_gpu import run_in_worker
from flower_gpu.calls.grants import driver_cap
from flower_gpu.leases.ledger import Ledger

def interrupt():
    raise KeyboardInterrupt

driver_cap.remove_stale = interrupt  # Ctrl-C arrives while groups of dead workers are removed
for gpu in ("require", "never"):
    try:
        run_in_worker("os:getpid", gpu=gpu, num_gpus=1, num_cpus=1, start_method="spawn")
        print("done", end=" ")
    except KeyboardInterrupt:
        print("interrupted", end=" ")
    print(len(Ledger().status().holders))
"""


def test_a_lease_is_released_if_the_cleanup_after_a_call_fails(
    calls_host: CallsHost, run_script: Any
) -> None:
    """A call on the CPU creates no control group, so there is nothing to remove."""
    process = run_script(_INTERRUPTED, env=calls_host.env)
    assert process.stdout.splitlines() == ["interrupted 0", "done 0"]
