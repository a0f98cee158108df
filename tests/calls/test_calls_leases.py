"""Each call has its lease: granted before its worker starts, gone with it, whatever ends either of them."""

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
def test_a_worker_sees_its_lease_which_is_held_while_it_lives(calls_host: CallsHost, method: str) -> None:
    caller = calls_host.start()
    caller.tell(
        "run",
        "calls_tasks:follow",
        [calls_host.tell("here"), calls_host.wait("go")],
        start_method=method,
        gpu_memory="4GiB",
        name="7",
    )
    pid = calls_host.reached("here")
    [holder] = calls_host.holders()
    assert holder["pid"] == caller.pid
    assert holder["parts"] == {calls_host.uuid: 4 * GIB}
    assert holder["label"] == "calls_tasks:follow of client 7"
    calls_host.go("go")
    found = caller.answer()
    assert calls_host.holders() == []
    assert found["pid"] == pid
    assert (pid == caller.pid) == (method == "in-process")
    assert found["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
    lease = json.loads(found["FLOWER_GPU_LEASE"])
    [share] = lease["shares"]
    assert (share["uuid"], share["memory_bytes"], share["total_bytes"]) == (
        calls_host.uuid,
        4 * GIB,
        16 * GIB,
    )
    assert share["cap_bytes"] == 4 * GIB - (512 << 20)
    assert found["PYTORCH_ALLOC_CONF"] == with_cap("0.218750000000")
    assert calls_host.events() == ["lease_granted", "worker_started", "worker_finished", "lease_released"]
    for event in (one for one in calls_host.trace() if "lease" in one):
        assert (event["lease"], event["client"], event["task"]) == (lease["id"], "7", "calls_tasks:follow")
    left = caller("seen")  # this process has nothing of it, not even after a call within it
    assert [left[name] for name in left if name != "pid"] == [None, None, None]


@pytest.mark.parametrize("method", METHODS)
def test_a_lease_is_free_when_its_caller_is_killed(calls_host: CallsHost, method: str) -> None:
    caller = calls_host.start()
    steps = [["child", str(calls_host.folder / "child")], calls_host.tell("here"), calls_host.wait("never")]
    caller.tell("run", "calls_tasks:follow", steps, start_method=method)
    pids = [calls_host.reached("here"), calls_host.reached("child")]
    assert len(calls_host.holders()) == 1
    caller.kill()
    calls_host.until_free()
    assert all(is_gone(pid) for pid in pids)  # it is held for as long as one of them lives
    assert calls_host.start().follow()["CUDA_VISIBLE_DEVICES"] == calls_host.uuid


@pytest.mark.parametrize("method", METHODS)
def test_a_lease_is_free_when_its_worker_is_killed(calls_host: CallsHost, method: str) -> None:
    """Its forks hold the lease until they are gone. Another program does not hold it, and ends as well."""
    caller = calls_host.start()
    steps = [
        ["child", str(calls_host.folder / "child")],
        ["child", str(calls_host.folder / "exec")],
        calls_host.tell("here"),
        calls_host.wait("never"),
    ]
    caller.tell("run", "calls_tasks:follow", steps, start_method=method, gpu_memory="2GiB")
    pids = [calls_host.reached(name) for name in ("here", "child", "exec")]
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


def test_the_time_of_a_call_counts_from_its_lease(calls_host: CallsHost) -> None:
    first, second = calls_host.start(), calls_host.start()
    steps = [calls_host.tell("here"), calls_host.wait("go")]
    first.tell("run", "calls_tasks:follow", steps, gpu_memory="10GiB", start_method="fork")
    calls_host.reached("here")
    second.tell(
        "run", "calls_tasks:follow", [["sleep", 0.5]], gpu_memory="10GiB", start_method="fork", timeout_s=8
    )
    calls_host.until_waiting(second)
    waiting = calls_host.start()
    waiting.fails("run", "calls_tasks:seen", gpu_memory="10GiB", lease_timeout_s=9)  # longer than timeout_s
    calls_host.go("go")
    first.answer()
    second.answer()
    *_, granted = calls_host.trace("lease_granted")
    assert granted["waited_s"] > 8


def test_no_lease_in_time_names_who_has_it(calls_host: CallsHost) -> None:
    first, second = calls_host.start(), calls_host.start()
    steps = [calls_host.tell("here"), calls_host.wait("go")]
    first.tell("run", "calls_tasks:follow", steps, gpu_memory="10GiB", name="4", start_method="fork")
    calls_host.reached("here")
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


def test_what_no_gpu_can_give_fails_at_once(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    for options, text in (
        ({"gpu_memory": "20GiB"}, "asks for 20.0 GiB of one GPU, more than any GPU has"),
        ({"num_gpus": 3}, "asks for 3 GPUs and may use 1"),
        ({"num_gpus": 0.01}, "too little for CUDA itself"),
    ):
        error = caller.fails("run", "calls_tasks:seen", **options)
        assert error.name == "LeaseError" and text in error.text
    error = caller.fails("run", "calls_tasks:seen", gpu_memory="300MiB")  # less than a context
    assert error.name == "ConfigError"
    assert "asks for 300 MiB of GPU 0" in error.text and "512 MiB" in error.text
    assert calls_host.trace("lease_granted", "worker_started") == []
    assert list(calls_host.ledger.glob("*/*.ticket")) == []


def test_a_call_whose_cap_cannot_be_computed_fails(calls_host: CallsHost) -> None:
    """A part of the lease would be the cap of JAX and PyTorch, instead of a part of the GPU."""
    caller = calls_host.start()
    caller("nvml_fails_once_granted")
    error = caller.fails("run", "calls_tasks:seen", start_method="fork", name="6")
    assert error.name == "GPUUnavailableError"
    assert "seen of client 6 was not started: it has a lease on GPU 0 (NVIDIA Stub 16GB), but" in error.text
    assert "it is lost" in error.text and "flower-gpu gpus" in error.text
    assert [one["reason"] for one in calls_host.trace("lease_not_granted")] == [error.name]
    assert calls_host.trace("worker_started") == []
    calls_host.stub.set(0, lost=False)
    assert calls_host.holders() == []
    assert calls_host.start().follow(start_method="fork")["CUDA_VISIBLE_DEVICES"] == calls_host.uuid


@pytest.mark.parametrize("fields", [{"unlisted": 1}, {"shift": 9_000_000}], ids=["container", "host-pids"])
def test_what_the_driver_does_not_tell_is_not_learned(calls_host: CallsHost, fields: Any) -> None:
    """Nothing used was taken for a footprint of a context: the next calls ran out of their leases."""
    calls_host.stub.set(0, **fields)
    caller = calls_host.start()
    for _ in range(2):
        caller.follow(["take", 3.0], start_method="fork")
    assert caller("footprints") == []
    assert calls_host.granted() == [0.0, 0.0]
    assert calls_host.trace("out_of_memory") == []
    [line] = caller("lines")
    assert "does not tell how much memory a process uses on GPU 0 (NVIDIA Stub 16GB)" in line
    assert "num_gpus or gpu_memory" in line
    caller.follow(["take", 3.0], start_method="fork", gpu_memory="4GiB")
    assert caller("lines") == []
    calls_host.stub.set(0, **dict.fromkeys(fields))
    caller.follow(["take", 3.0], start_method="fork")
    assert [peak for *_, peak in caller("footprints")] == [int(3.5 * GIB)]


@pytest.mark.parametrize(("placement", "gpus"), [("spread", 2), ("pack", 1)])
def test_calls_are_placed_as_the_environment_says(calls_host: CallsHost, placement: str, gpus: int) -> None:
    calls_host.add_gpu()
    steps = [calls_host.wait("go")]
    callers = [calls_host.start(FLOWER_GPU_PLACEMENT=placement, FLOWER_GPU_MEMORY="4GiB") for _ in range(2)]
    for number, caller in enumerate(callers, start=1):
        caller.tell("run", "calls_tasks:follow", steps, start_method="fork")
        calls_host.until(lambda state, number=number: len(state["holders"]) == number)
    assert len({uuid for holder in calls_host.holders() for uuid in holder["parts"]}) == gpus
    calls_host.go("go")
    assert len({caller.answer()["CUDA_VISIBLE_DEVICES"] for caller in callers}) == gpus


@pytest.mark.parametrize(("gpu", "method"), [("never", "forkserver"), ("offer", "fork"), ("offer", "spawn")])
def test_what_a_module_or_task_sets_changes_nothing(calls_host: CallsHost, method: str, gpu: str) -> None:
    """Scripts for one GPU begin with it: a hidden GPU stays hidden, and a worker keeps the one it has."""
    task = "calls_sets_variables:seen"
    found = calls_host.start()("run", task, start_method=method, gpu=gpu, gpu_memory="4GiB")
    if gpu == "never":
        assert (found["CUDA_VISIBLE_DEVICES"], found["FLOWER_GPU_LEASE"]) == ("", "")
        assert calls_host.events() == ["worker_started", "worker_finished"]
    else:
        assert found["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
        for held in (found["cleared"], found["patched"]):
            assert held["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
            assert "FLOWER_GPU_LEASE" in held and "PATH" not in held
        assert "OWN" in found["patched"] and "OWN" not in found["cleared"]
        assert found["PYTORCH_ALLOC_CONF"] == with_cap("0.218750000000", "expandable_segments:True")


def test_what_the_environment_shows_is_all_that_a_call_may_have(calls_host: CallsHost) -> None:
    other = calls_host.add_gpu()
    first, caller = calls_host.start(), calls_host.start()
    first.tell(
        "run", "calls_tasks:follow", [calls_host.wait("go")], num_gpus=1, env={"CUDA_VISIBLE_DEVICES": "1"}
    )
    calls_host.until(lambda state: [list(one["parts"]) for one in state["holders"]] == [[other]])
    error = caller.fails(
        "run", "calls_tasks:seen", num_gpus=1, env={"CUDA_VISIBLE_DEVICES": "1"}, lease_timeout_s=0.2
    )
    assert error.name == "LeaseTimeoutError"
    calls_host.go("go")
    assert first.answer()["CUDA_VISIBLE_DEVICES"] == other
    found = caller.follow(num_gpus=1, env={"CUDA_VISIBLE_DEVICES": "1"}, start_method="fork")
    assert found["CUDA_VISIBLE_DEVICES"] == other
    caller("environment", {"CUDA_VISIBLE_DEVICES": ""})
    found = caller.follow(num_gpus=1, start_method="fork")
    assert (found["CUDA_VISIBLE_DEVICES"], found["FLOWER_GPU_LEASE"]) == ("", "")
    error = caller.fails("run", "calls_tasks:seen", gpu="require")
    assert error.name == "GPUUnavailableError"
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in error.text
    assert caller.follow(gpu="offer", env={"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] != ""


def test_the_server_asks_and_the_node_decides(calls_host: CallsHost) -> None:
    other = calls_host.add_gpu()
    caller = calls_host.start()

    def visible(*configs: dict[str, Any], **options: Any) -> str:
        metrics = caller("fit", *configs, start_method="fork", gpu_memory="2GiB", **options)
        assert metrics["leased"] == bool(metrics["visible"])
        found: str = metrics["visible"]
        return found

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


def test_a_forced_gpu_that_is_not_there_is_told_once(calls_host: CallsHost) -> None:
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
def test_a_call_within_a_call_is_under_the_same_lease(calls_host: CallsHost, method: str) -> None:
    """With all of the GPU taken, one that waited for a lease of its own would wait for ever."""
    inner = {"start_method": method, "lease_timeout_s": 5, "env": {"CUDA_VISIBLE_DEVICES": "0"}}
    found = calls_host.start()("run", "calls_tasks:nested", inner, num_gpus=1, start_method=method)
    outer, within = found
    assert outer.pop("pid") != within.pop("pid")
    assert outer == within
    assert outer["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
    assert len(calls_host.trace("lease_granted")) == 1


def test_a_call_within_a_call_without_gpu_has_none(calls_host: CallsHost) -> None:
    inner = {"start_method": "fork", "gpu": "force", "env": {"CUDA_VISIBLE_DEVICES": "0"}}
    _, within = calls_host.start()("run", "calls_tasks:nested", inner, gpu="never", start_method="fork")
    assert (within["CUDA_VISIBLE_DEVICES"], within["FLOWER_GPU_LEASE"]) == ("", "")
    assert calls_host.trace("lease_granted") == []


def test_threads_of_a_process_have_leases_of_their_own_and_take_turns(calls_host: CallsHost) -> None:
    """A fork made by one thread does not keep the lease of another."""
    call = ["calls_tasks:follow", [[["sleep", 0.1]]], {"start_method": "fork", "gpu_memory": "10GiB"}]
    for reply in calls_host.start()("run_in_threads", call, call, call):
        value_of(reply)
    events = calls_host.trace("lease_granted", "worker_finished")
    assert [one["event"] for one in events] == ["lease_granted", "worker_finished"] * 3
    assert len({one["lease"] for one in events}) == 3
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


def test_evaluation_on_the_server_takes_a_lease_like_everybody(calls_host: CallsHost) -> None:
    loss, metrics = calls_host.start()("evaluate", start_method="fork", gpu_memory="3GiB")
    assert (loss, metrics["leased"]) == (1.0, 1.0)
    assert calls_host.events(client="server", task="evaluate") == [
        "lease_granted", "worker_started", "worker_finished", "lease_released"
    ]  # fmt: skip
    assert calls_host.granted() == [3.0]


_INTERRUPTED = """
from flower_gpu import run_in_worker
from flower_gpu.gpu import driver_cap
from flower_gpu.leases.ledger import Ledger

def interrupt():
    raise KeyboardInterrupt

driver_cap.remove_stale = interrupt  # Ctrl-C comes while groups of dead workers are removed
for gpu in ("require", "never"):
    try:
        run_in_worker("os:getpid", gpu=gpu, num_gpus=1, num_cpus=1, start_method="spawn")
        print("done", end=" ")
    except KeyboardInterrupt:
        print("interrupted", end=" ")
    print(len(Ledger().status().holders))
"""


def test_a_lease_goes_back_whatever_fails_after_its_call(calls_host: CallsHost, run_script: Any) -> None:
    """A call on the CPU leaves no group, so it has nothing to remove."""
    done = run_script(_INTERRUPTED, env=calls_host.env)
    assert done.stdout.splitlines() == ["interrupted 0", "done 0"]
