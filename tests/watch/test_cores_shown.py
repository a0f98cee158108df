"""What a run's history and result say of cores and main memory."""

from __future__ import annotations

from typing import Any

from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import RunClock, tries_of
from flower_gpu.watch.result import result_of

MIB = 1 << 20


def event(at: float, name: str, call: str, **fields: Any) -> dict[str, Any]:
    whose = {"call": call, "client": call, "task": "train", "round": 1}
    return {"time": at, "event": name, **whose, **fields}


def call(name: str, asked: float, got: float, end: float, cores: float) -> list[dict[str, Any]]:
    has = {"lease": f"lease-{name}", "cores": cores, "host_memory_bytes": 100 * MIB}
    worker = {"pid": int(name), "start_method": "fork", "cores_lease": f"lease-{name}"}
    return [
        event(asked, "cores_requested", name, caller_pid=1, cores=cores),
        event(got, "cores_granted", name, waited_s=got - asked, **has),
        event(got + 0.1, "worker_started", name, **worker),
        event(end - 0.1, "worker_finished", name, outcome="ok", seconds=1.0, **worker),
        event(end, "cores_released", name, lease=f"lease-{name}", held_s=end - got),
    ]


def test_cores_of_a_run_are_summed_up_and_the_wait_is_a_part_of_the_call() -> None:
    events = [*call("1", 0.0, 0.0, 10.0, 1.5), *call("2", 1.0, 1.0, 4.0, 0.5), *call("3", 2.0, 10.0, 12.0, 1)]
    history = History()
    history.feed(sorted(events, key=lambda one: one["time"]))
    clock = RunClock.of(history)
    waited = {one.whose.call: one.parts[0].seconds for one in tries_of(history, clock)}
    assert len(waited) == 3 and waited["3"] == 8.0
    result = result_of(history)
    assert result["cores"] == {"count": 3, "waited_s": 8.0, "longest_wait_s": 8.0}
    assert result["leases"]["count"] == 0  # those are of GPUs
