"""Part ``cap``: a client requests twice the memory of its lease while its neighbor trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.clients import Client, Request, ask, check_deadline, checked, clients
from benchmarks.gpu.setting import MB, Setting
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 120.0

_LEASES_PER_GPU = 8
_DIRECT = "direct"  # Name of the client that calls CUDA itself.
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def measure(setting: Setting) -> dict[str, Any]:
    lease = setting.memory().free_bytes // _LEASES_PER_GPU
    with clients("ours", 2) as (neighbor, greedy), clients("bare", 1) as (bare,):
        alone = checked(ask(neighbor, _steps(setting, lease, None), setting.deadline), neighbor)
        _marker(setting).unlink()
        neighbor.send(_steps(setting, lease, alone["steps"]))
        while not neighbor.has_replied() and not _marker(setting).exists():
            check_deadline(setting.deadline)
            time.sleep(0.02)
        refused = ask(greedy, _hold(setting, lease, greedy), setting.deadline)
        direct = ask(greedy, _call_cuda(lease), setting.deadline)
        while not neighbor.has_replied(1.0):
            check_deadline(setting.deadline)
        beside = checked(neighbor.receive(), neighbor)
        uncapped = ask(bare, _hold(setting, lease, bare), setting.deadline)
    events = setting.trace()
    event = next((event for event in events if event["event"] == "out_of_memory"), {})
    caps = [event["cap"] for event in events if event.get("client") == _DIRECT and "cap" in event]
    return {
        "lease_mb": round(lease / MB, 1),
        "requested_mb": round(2 * lease / MB, 1),
        "greedy": {
            "error": refused.get("error"),
            "message": refused.get("message"),
            "kind": event.get("kind"),
            "reserved_mb": _mb(event.get("reserved_bytes")),
            "cap_mb": _mb(event.get("cap_bytes")),
            "cap_in_force_mb": _mb(_cap_in_force(events, event.get("lease"))),
            "free_mb": _mb(event.get("free_bytes")),
        },
        "cuda_malloc": {
            "cap": caps[0] if caps else None,
            "answer": direct.get("answer"),
            "error": direct.get("error"),
        },
        "without_a_lease": {
            "error": uncapped.get("error"),
            "reserved_mb": _mb(uncapped.get("nbytes")),
        },
        "neighbor": {
            "steps": alone["steps"],
            "loss_alone": alone["loss"],
            "loss_beside": beside["loss"],
            "same": alone["loss"] == beside["loss"],
            "seconds_alone": round(alone["last"] - alone["first"], 2),
            "seconds_beside": round(beside["last"] - beside["first"], 2),
            "trained_after_the_error": beside["last"] > refused["ended"] > beside["first"],
        },
        "measured_s": round(time.monotonic() - setting.began, 1),
    }


def _steps(setting: Setting, lease: int, count: int | None) -> Request:
    options = {"gpu_memory": lease, "name": "neighbor", "env": _DETERMINISTIC}
    args = [setting.model, setting.sizes.neighbor_s, count, str(_marker(setting))]
    return {"do": "steps", "args": args, "options": options}


def _marker(setting: Setting) -> Path:
    """Return the file that the neighbor creates when its training begins."""
    return setting.folder / "training"


def _hold(setting: Setting, lease: int, client: Client) -> Request:
    options: dict[str, Any] = {}
    if client.way == "ours":
        options = {"gpu_memory": lease, "on_oom": "fail", "name": "greedy"}
    # Shorter than the neighbor's training, which has just begun.
    return {"do": "hold", "args": [2 * lease, setting.sizes.neighbor_s / 4], "options": options}


def _call_cuda(lease: int) -> Request:
    options = {"gpu_memory": lease, "on_oom": "fail", "name": _DIRECT}
    return {"do": "take_from_cuda", "args": [2 * lease], "options": options}


def _cap_in_force(events: list[dict[str, Any]], lease: str | None) -> int | None:
    """Return the allocator's cap as the worker of this lease read it back."""
    for event in events:
        if event["event"] == "worker_finished" and lease is not None and event.get("lease") == lease:
            for report in event.get("gpus") or ():
                cap: int | None = report["cap_in_force_bytes"]
                return cap
    return None


def _mb(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / MB, 1)


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError if the cap did not hold, or the neighbor's loss changed."""
    if result["greedy"]["error"] != "GPUOutOfMemoryError":
        raise BenchmarkError(f"cap: twice the lease was not refused: {result['greedy']}")
    direct = result["cuda_malloc"]
    if direct["cap"] == "driver" and direct["answer"] != _OUT_OF_MEMORY:
        raise BenchmarkError(f"cap: the driver did not refuse twice the lease to cudaMalloc: {direct}")
    if not result["neighbor"]["same"]:
        raise BenchmarkError(f"cap: the neighbor's loss has changed: {result['neighbor']}")


def show(result: dict[str, Any]) -> None:
    ways = ("greedy", "cuda_malloc", "without_a_lease")
    title = f"a client with a lease of {result['lease_mb']:.0f} MB requests {result['requested_mb']:.0f} MB"
    columns = "way error answer cap reserved_mb cap_mb cap_in_force_mb free_mb"
    table.show(title, [{"way": way, **result[way]} for way in ways], columns)
    table.show_figures("its neighbor", result["neighbor"])
