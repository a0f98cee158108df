"""A call that runs out of GPU memory gets a larger lease, a whole GPU, the CPU, or an error with the numbers.

The allocator of the workers is simulated. It allocates memory of a stub GPU, respects the lease and the free
memory, and fails with the messages of real allocators. Without CUDA, the worker recognizes such a failure by
the numbers of the driver.
"""

from __future__ import annotations

from typing import Any

import pytest
from calls_host import GIB, CallsHost

# The steps need 5.5 GiB with the context.
TOO_MUCH = [["allocate", 2.0], ["allocate", 3.0]]


def test_a_call_that_needs_more_than_its_lease_gets_a_larger_one(calls_host: CallsHost) -> None:
    """The second attempt gets unchanged arguments, although the first one has modified them in place."""
    caller = calls_host.start()
    steps = [["check"], ["allocate", 2.0], ["modify"], ["allocate", 3.0], ["check"]]
    result = caller("follow", steps, weights=[[4], [2, 2]], start_method="forkserver", gpu_memory="4GiB")
    assert result["answers"][0] == [0.0, 0.0] and result["answers"][-1] == [1.0, 1.0]
    # The new lease is the old one plus one and a half times the request that failed.
    assert calls_host.granted() == [4.0, 8.5]
    assert calls_host.events() == [
        *("lease_granted", "worker_started", "out_of_memory", "worker_finished", "lease_released"),
        *("lease_granted", "worker_started", "worker_finished", "lease_released"),
    ] or calls_host.events() == [
        *("lease_granted", "worker_started", "worker_finished", "out_of_memory", "lease_released"),
        *("lease_granted", "worker_started", "worker_finished", "lease_released"),
    ]
    [failure] = calls_host.trace("out_of_memory")
    assert (failure["kind"], failure["then"]) == ("over_cap", "again")
    assert (failure["asked_bytes"], failure["reserved_bytes"]) == (3 * GIB, int(2.5 * GIB))
    assert (failure["cap_bytes"], failure["free_bytes"]) == (4 * GIB, int(13.5 * GIB))
    assert (failure["total_bytes"], failure["uuid"]) == (16 * GIB, calls_host.uuid)
    first, second = calls_host.trace("lease_granted")
    assert failure["lease"] == first["lease"] != second["lease"]
    assert [event["outcome"] for event in calls_host.trace("worker_finished")] == ["out of memory", "ok"]
    # PyTorch 2.10 and 2.11 cause another warning, because they lack a feature.
    retry_line, figures = [line for line in caller("lines") if "PyTorch" not in line]
    assert retry_line.endswith(" ran out of memory on GPU 0 with 4.0 GiB: it runs again")
    assert "it took more than its lease" in figures and "Asked 3.0 GiB, reserved 2.5 GiB" in figures
    assert calls_host.holders() == []


def test_a_call_that_keeps_growing_finally_gets_a_whole_gpu(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    steps = [["allocate", 0.5], ["allocate", 0.25]] + [["allocate", 0.25]] * 20
    caller.follow(*steps, gpu_memory="1GiB", start_method="fork")
    assert calls_host.granted() == [1.0, 2.0, 4.0, 0.0]
    assert [event["then"] for event in calls_host.trace("out_of_memory")] == ["again"] * 3
    assert [event["alone"] for event in calls_host.trace("lease_granted")] == [False] * 3 + [True]
    error = caller.fails("follow", [["allocate", 20.0]], gpu_memory="4GiB", start_method="fork")
    assert error.name == "GPUOutOfMemoryError" and "in 2 tries" in error.text
    # A request beyond the size of the GPU is not tried a third time.
    assert calls_host.granted()[4:] == [4.0, 0.0]


def test_figures_are_logged_only_for_the_first_failure(calls_host: CallsHost) -> None:
    """The log has one short line for each attempt."""
    caller = calls_host.start()
    steps = [["allocate", 0.5], ["allocate", 0.25]] + [["allocate", 0.25]] * 20
    caller.follow(*steps, gpu_memory="1GiB", start_method="fork")
    lines = [line for line in caller("lines") if "out of memory" in line]
    short = [line for line in lines if line.endswith(": it runs again")]
    assert [line.partition(" with ")[2] for line in short] == [
        f"{size} GiB: it runs again" for size in ("1.0", "2.0", "4.0")
    ]
    assert max(map(len, short)) < 100
    (figures,) = set(lines) - set(short)
    assert "Asked 256 MiB" in figures
    assert figures.endswith("these figures are in the trace, and in the log with -v")


@pytest.mark.parametrize("on_oom", ["retry", "cpu"])
def test_a_gpu_that_stays_full_ends_the_wait(calls_host: CallsHost, on_oom: str) -> None:
    """The call runs on the CPU or fails, and its error has the numbers and not only the wait."""
    caller = calls_host.start()
    steps = [["allocate", 1.0], calls_host.announce("here"), calls_host.wait("go"), ["allocate", 2.0]]
    options = {"gpu_memory": "4GiB", "start_method": "fork", "lease_timeout_s": 0.5, "on_oom": on_oom}
    caller.send("follow", steps, **options)
    calls_host.wait_until_reached("here")
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


def test_fail_raises_at_once_with_the_numbers(calls_host: CallsHost) -> None:
    other, caller = calls_host.start(), calls_host.start()
    holding = {"gpu_memory": "2GiB", "start_method": "fork", "name": "o"}
    other.send("follow", [calls_host.wait("done")], **holding)
    calls_host.until(lambda state: state["holders"])
    calls_host.stub.program(0, GIB, name="/usr/bin/desktop")
    failing = {"gpu_memory": "4GiB", "on_oom": "fail", "start_method": "forkserver", "name": "6"}
    error = caller.fails("follow", TOO_MUCH, **failing)
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
    # The worker's traceback follows.
    assert "calls_tasks.py" in rest[0][1]
    assert [event["then"] for event in calls_host.trace("out_of_memory")] == ["failed"]
    assert len(calls_host.trace("worker_started")) == 2


def test_the_last_attempt_can_run_on_the_cpu(calls_host: CallsHost) -> None:
    caller = calls_host.start(FLOWER_GPU_ON_OOM="cpu")
    steps = [["check"], ["modify"], ["allocate", 20.0], ["check"]]
    result = caller("follow", steps, weights=[[4]], gpu_memory="4GiB", start_method="fork")
    assert result["answers"] == [[0.0], None, "on the CPU", [1.0]]
    assert (result["CUDA_VISIBLE_DEVICES"], result["FLOWER_GPU_LEASE"]) == ("", "")
    assert [event["then"] for event in calls_host.trace("out_of_memory")] == ["again", "on the CPU"]
    assert ["lease" in event for event in calls_host.trace("worker_started")] == [True, True, False]
    assert calls_host.events()[-3:] == ["lease_released", "worker_started", "worker_finished"]
    assert calls_host.holders() == []


def test_a_node_that_requires_a_gpu_runs_no_call_on_the_cpu(calls_host: CallsHost) -> None:
    error = calls_host.start().fails(
        "follow", [["allocate", 20.0]], gpu="require", on_oom="cpu", start_method="fork"
    )
    assert error.name == "GPUOutOfMemoryError"
    assert [event["then"] for event in calls_host.trace("out_of_memory")] == ["failed"]


def test_an_in_process_call_has_one_attempt(calls_host: CallsHost) -> None:
    """The process does not free its memory, so another attempt would fail as well."""
    error = calls_host.start().fails(
        "follow", TOO_MUCH, gpu_memory="4GiB", on_oom="cpu", start_method="in-process"
    )
    assert error.name == "GPUOutOfMemoryError" and "it took more than its lease" in error.text
    assert error.causes[0][0] == "RuntimeError"
    assert len(calls_host.trace("worker_started")) == 1
    assert [event["then"] for event in calls_host.trace("out_of_memory")] == ["failed"]
    assert calls_host.holders() == []


def test_other_errors_are_passed_through(calls_host: CallsHost) -> None:
    steps = [["allocate", 1.0], ["fail", "MemoryError", "no memory of that"]]
    error = calls_host.start().fails("follow", steps, gpu_memory="4GiB")
    assert (error.name, error.text) == ("MemoryError", "no memory of that")
    [(name, text)] = error.causes
    assert name == "WorkerTraceback" and "calls_tasks.py" in text and "in _fail" in text
    assert calls_host.trace("out_of_memory") == []
    assert len(calls_host.trace("worker_started")) == 1


def test_a_client_that_runs_out_of_memory_does_not_end_the_round(calls_host: CallsHost) -> None:
    caller = calls_host.start()
    steps = '[["allocate", 20.0]]'
    options: dict[str, Any] = {"gpu_memory": "4GiB", "start_method": "fork"}
    error = caller.fails("app", {"steps": steps}, **options)
    # Flower turns the exception into an error reply.
    assert error.name == "GPUOutOfMemoryError"
    result = caller("app", {"steps": steps}, on_oom="cpu", **options)
    assert (result["code"], result["visible"]) == ("OK", "")
    caller("look_like_start_client")
    result = caller("app", {"steps": steps}, **options)
    assert result["code"] != "OK"
    assert result["message"].startswith("GPUOutOfMemoryError: fit of client")
    result = caller("app", {"steps": '[["allocate", 5.0]]'}, **options)
    assert (result["code"], result["visible"]) == ("OK", calls_host.uuid)
    assert calls_host.holders() == []
