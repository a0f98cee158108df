"""Snapshots for the tests that draw them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvml_stub import GIB

from flower_gpu.watch.top.snapshot import GPURow, HostRow, RunRow, Snapshot, WaitingRow, WorkerRow

WORKER = WorkerRow(
    run="quickstart",
    client="3",
    task="fit",
    round=2,
    label="",
    user="me",
    pid=4321,
    gpus=(0,),
    lease="1f",
    lease_bytes=4 * GIB,
    used_bytes=2 * GIB,
    seconds=42.0,
    phase="running",
    progress="epoch 1",
    progress_done=12,
    progress_total=40,
)
#: Fields that are unknown for a worker that only holds a lease, is starting, or runs on the CPU.
UNKNOWN: dict[str, Any] = {"used_bytes": None}
UNKNOWN |= {"progress": "", "progress_done": None, "progress_total": None}
HELD = replace(WORKER, run="", client="", task="", round=None, lease="2f", phase="held", **UNKNOWN)
WAITING = WaitingRow(
    lease="3f",
    run="quickstart",
    label="fit of client 7",
    user="me",
    pid=4322,
    asked_bytes=4 * GIB,
    asked_share=None,
    asked_alone=False,
    count=1,
    gpus=(0,),
    seconds=7.0,
)
RUN = RunRow(
    run="quickstart",
    kind="launch",
    folder="/home/me/runs/1",
    pid=4300,
    seconds=80.0,
    round=2,
    num_rounds=3,
    task="",
    messages_done=None,
    messages=None,
    calls_done={"fit": 5},
    metrics={"loss": 0.912, "accuracy": 0.7125},
    metrics_round=1,
    outcome="",
    read_part=1.0,
)
SIMULATION = replace(
    RUN,
    run="digits",
    kind="simulate",
    pid=4400,
    seconds=3884.0,
    round=12,
    num_rounds=50,
    task="train",
    messages_done=40,
    messages=100,
    calls_done={},
    metrics={"accuracy": 0.875, "loss": 0.5},
    metrics_round=12,
    cores=4.0,
)
ON_CPU = replace(
    WORKER,
    run="digits",
    client="17",
    task="train",
    round=12,
    pid=4401,
    gpus=(),
    lease="",
    lease_bytes=None,
    seconds=1.0,
    **UNKNOWN,
)


RESOURCES = HostRow(cores=8.0, cores_leased=6.0, memory_capacity_bytes=32 * GIB, memory_leased_bytes=3 * GIB)


def gpu(index: int = 0) -> GPURow:
    return GPURow(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA Stub 16GB",
        mig_parent=None,
        problem=None,
        total_bytes=16 * GIB,
        used_bytes=6 * GIB,
        utilization_percent=35,
        temperature_c=41,
        capacity_bytes=14 * GIB,
        own_leased_bytes=8 * GIB,
        own_used_bytes=3 * GIB,
        other_leased_bytes=2 * GIB,
        other_used_bytes=GIB,
        programs_bytes=2 * GIB,
    )


def workers(count: int) -> tuple[WorkerRow, ...]:
    return tuple(replace(WORKER, client=str(number), pid=5000 + number) for number in range(count))


def waiting(count: int) -> tuple[WaitingRow, ...]:
    return tuple(replace(WAITING, label=f"fit of client {100 + number}") for number in range(count))


def snapshot(**changes: object) -> Snapshot:
    """Return a snapshot with rows of each kind."""
    default = Snapshot(
        time=0.0,
        host="gpubox",
        account="me",
        gpu_problem=None,
        ledger_problem=None,
        gpus=(gpu(),),
        runs=(RUN, SIMULATION),
        workers=(
            WORKER,
            replace(WORKER, client="5", seconds=3.0, phase="starting", **UNKNOWN),
            ON_CPU,
            replace(HELD, label="evaluate of client 1", lease_bytes=GIB, seconds=600.0),
            replace(HELD, user="alice", lease_bytes=2 * GIB, seconds=7200.0),
        ),
        waiting=(
            WAITING,
            replace(WAITING, run="", label="", user="alice", asked_bytes=None, asked_alone=True),
        ),
    )
    return replace(default, **changes)  # type: ignore[arg-type]
