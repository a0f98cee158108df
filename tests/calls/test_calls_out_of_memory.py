"""A call that runs out of GPU memory: more of a GPU, all of one, the CPU, or an error with the numbers.

The workers' allocator is simulated: it takes memory of a stub GPU, and fails in the words of those that are
real, within its lease and by what the GPU has free. Without CUDA the worker tells by the driver's numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
from calls_host import GIB, CallsHost

TOO_MUCH = [["take", 2.0], ["take", 3.0]]  # with the context 5.5 GiB


def test_a_call_that_needs_more_than_its_lease_gets_more(calls_host: CallsHost) -> None:
    """And finds its arguments as they were, though the first try has changed them in place."""
    caller = calls_host.start()
    steps = [["check"], ["take", 2.0], ["spoil"], ["take", 3.0], ["check"]]
    found = caller(
        "run",
        "calls_tasks:follow",
        steps,
        weights=[[4], [2, 2]],
        start_method="forkserver",
        gpu_memory="4GiB",
    )
    assert found["answers"][0] == [0.0, 0.0] and found["answers"][-1] == [1.0, 1.0]
    assert calls_host.granted() == [4.0, 8.5]  # what it had, and one and a half of what it asked for
    assert calls_host.events() == [
        *("lease_granted", "worker_started", "out_of_memory", "worker_finished", "lease_released"),
        *("lease_granted", "worker_started", "worker_finished", "lease_released"),
    ] or calls_host.events() == [
        *("lease_granted", "worker_started", "worker_finished", "out_of_memory", "lease_released"),
        *("lease_granted", "worker_started", "worker_finished", "lease_released"),
    ]
    [told] = calls_host.trace("out_of_memory")
    assert (told["kind"], told["then"]) == ("over_cap", "again")
    assert (told["asked_bytes"], told["reserved_bytes"]) == (3 * GIB, int(2.5 * GIB))
    assert (told["cap_bytes"], told["free_bytes"]) == (4 * GIB, int(13.5 * GIB))
    assert (told["total_bytes"], told["uuid"]) == (16 * GIB, calls_host.uuid)
    first, second = calls_host.trace("lease_granted")
    assert told["lease"] == first["lease"] != second["lease"]
    assert [one["outcome"] for one in calls_host.trace("worker_finished")] == ["out of memory", "ok"]
    lines = [line for line in caller("lines") if "PyTorch" not in line]  # 2.10 and 2.11 lack something
    what_follows, figures = lines
    assert what_follows.endswith(" ran out of memory on GPU 0 with 4.0 GiB: it runs again")
    assert "it took more than its lease" in figures and "Asked 3.0 GiB, reserved 2.5 GiB" in figures
    assert calls_host.holders() == []


def test_a_call_that_grows_and_grows_has_the_gpu_to_itself_at_last(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    steps = [["take", 0.5], ["take", 0.25]] + [["take", 0.25]] * 20
    caller.follow(*steps, gpu_memory="1GiB", start_method="fork")
    assert calls_host.granted() == [1.0, 2.0, 4.0, 0.0]
    assert [one["then"] for one in calls_host.trace("out_of_memory")] == ["again"] * 3
    assert [one["alone"] for one in calls_host.trace("lease_granted")] == [False] * 3 + [True]
    error = caller.fails(
        "run", "calls_tasks:follow", [["take", 20.0]], gpu_memory="4GiB", start_method="fork"
    )
    assert error.name == "GPUOutOfMemoryError" and "in 2 tries" in error.text
    assert calls_host.granted()[4:] == [4.0, 0.0]  # to ask for more than there is would help no more


def test_figures_are_logged_for_the_first_of_many_calls(calls_host: CallsHost) -> None:
    """Each try has one short line."""
    caller = calls_host.start()
    steps = [["take", 0.5], ["take", 0.25]] + [["take", 0.25]] * 20
    caller.follow(*steps, gpu_memory="1GiB", start_method="fork")
    lines = [line for line in caller("lines") if "out of memory" in line]
    short = [line for line in lines if line.endswith(": it runs again")]
    assert [line.partition(" with ")[2] for line in short] == [
        f"{size} GiB: it runs again" for size in ("1.0", "2.0", "4.0")
    ]
    assert max(map(len, short)) < 100
    (figures,) = set(lines) - set(short)
    assert "Asked 256 MiB" in figures and figures.endswith("the trace has these figures, and the log with -v")


@pytest.mark.parametrize("on_oom", ["retry", "cpu"])
def test_a_gpu_that_stays_full(calls_host: CallsHost, on_oom: str) -> None:
    """It is not waited for for ever: the CPU, or the numbers, not a message that only speaks of waiting."""
    caller = calls_host.start()
    steps = [["take", 1.0], calls_host.tell("here"), calls_host.wait("go"), ["take", 2.0]]
    options = {"gpu_memory": "4GiB", "start_method": "fork", "lease_timeout_s": 0.5, "on_oom": on_oom}
    caller.tell("run", "calls_tasks:follow", steps, **options)
    calls_host.reached("here")
    calls_host.stub.program(0, 13 * GIB)
    calls_host.go("go")
    if on_oom == "cpu":
        assert caller.answer()["answers"][-1] == "on the CPU"
    else:
        error = caller.failure()
        assert error.name == "GPUOutOfMemoryError"
        assert "the GPU itself was full" in error.text
        assert "Asked 2.0 GiB" in error.text and "lease_timeout_s=0.5" in error.text
        assert error.causes[0][0] == "RuntimeError"
    assert calls_host.holders() == []


def test_fail_means_at_once_and_with_the_numbers(calls_host: CallsHost) -> None:
    other, caller = calls_host.start(), calls_host.start()
    holding = {"gpu_memory": "2GiB", "start_method": "fork", "name": "o"}
    other.tell("run", "calls_tasks:follow", [calls_host.wait("done")], **holding)
    calls_host.until(lambda state: state["holders"])
    calls_host.stub.program(0, GIB, name="/usr/bin/desktop")
    failing = {"gpu_memory": "4GiB", "on_oom": "fail", "start_method": "forkserver", "name": "6"}
    error = caller.fails("run", "calls_tasks:follow", TOO_MUCH, **failing)
    calls_host.go("done")
    other.answer()
    assert error.name == "GPUOutOfMemoryError"
    assert {"WorkerError", "GPUError"} <= set(error.names)
    assert error.text.startswith(
        "calls_tasks:follow of client 6: out of memory on GPU 0 (NVIDIA Stub 16GB): "
        "it took more than its lease. "
        "Asked 3.0 GiB, reserved 2.5 GiB, cap 4.0 GiB of a lease of 4.0 GiB, free 12.5 GiB of 16.0 GiB. "
        "Also there: 2.0 GiB leased to calls_tasks:follow of client o"
    )
    assert "1.0 GiB used by process" in error.text
    assert "/usr/bin/desktop" in error.text and "on_oom='cpu'" in error.text
    (name, text), *rest = error.causes
    assert name == "RuntimeError" and text.startswith("CUDA out of memory. Tried to allocate 3.00 GiB")
    assert "calls_tasks.py" in rest[0][1]  # the worker's traceback
    assert [one["then"] for one in calls_host.trace("out_of_memory")] == ["failed"]
    assert len(calls_host.trace("worker_started")) == 2


def test_the_cpu_is_the_third_kind_of_try(calls_host: CallsHost) -> None:
    caller = calls_host.start(FLOWER_GPU_ON_OOM="cpu")
    steps = [["check"], ["spoil"], ["take", 20.0], ["check"]]
    found = caller("run", "calls_tasks:follow", steps, weights=[[4]], gpu_memory="4GiB", start_method="fork")
    assert found["answers"] == [[0.0], None, "on the CPU", [1.0]]
    assert (found["CUDA_VISIBLE_DEVICES"], found["FLOWER_GPU_LEASE"]) == ("", "")
    assert [one["then"] for one in calls_host.trace("out_of_memory")] == ["again", "on the CPU"]
    assert ["lease" in one for one in calls_host.trace("worker_started")] == [True, True, False]
    assert calls_host.events()[-3:] == ["lease_released", "worker_started", "worker_finished"]
    assert calls_host.holders() == []


def test_a_node_that_requires_a_gpu_has_no_call_on_the_cpu(calls_host: CallsHost) -> None:
    error = calls_host.start().fails(
        "run", "calls_tasks:follow", [["take", 20.0]], gpu="require", on_oom="cpu", start_method="fork"
    )
    assert error.name == "GPUOutOfMemoryError"
    assert [one["then"] for one in calls_host.trace("out_of_memory")] == ["failed"]


def test_in_the_process_itself_there_is_one_try(calls_host: CallsHost) -> None:
    """Its memory is not given back."""
    error = calls_host.start().fails(
        "run", "calls_tasks:follow", TOO_MUCH, gpu_memory="4GiB", on_oom="cpu", start_method="in-process"
    )
    assert error.name == "GPUOutOfMemoryError" and "it took more than its lease" in error.text
    assert error.causes[0][0] == "RuntimeError"
    assert len(calls_host.trace("worker_started")) == 1
    assert [one["then"] for one in calls_host.trace("out_of_memory")] == ["failed"]
    assert calls_host.holders() == []


def test_other_errors_are_passed_through(calls_host: CallsHost) -> None:
    steps = [["take", 1.0], ["fail", "MemoryError", "no memory of that"]]
    error = calls_host.start().fails("run", "calls_tasks:follow", steps, gpu_memory="4GiB")
    assert (error.name, error.text) == ("MemoryError", "no memory of that")
    [(name, text)] = error.causes
    assert name == "WorkerTraceback" and "calls_tasks.py" in text and "in _fail" in text
    assert calls_host.trace("out_of_memory") == []
    assert len(calls_host.trace("worker_started")) == 1


def test_a_round_goes_on(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    steps = '[["take", 20.0]]'
    options: dict[str, Any] = {"gpu_memory": "4GiB", "start_method": "fork"}
    error = caller.fails("app", {"steps": steps}, **options)
    assert error.name == "GPUOutOfMemoryError"  # Flower makes an error reply of it
    found = caller("app", {"steps": steps}, on_oom="cpu", **options)
    assert (found["code"], found["visible"]) == ("OK", "")
    caller("as_start_client")
    found = caller("app", {"steps": steps}, **options)
    assert found["code"] != "OK"
    assert found["message"].startswith("GPUOutOfMemoryError: fit of client")
    found = caller("app", {"steps": '[["take", 5.0]]'}, **options)
    assert (found["code"], found["visible"]) == ("OK", calls_host.uuid)
    assert calls_host.holders() == []
