"""Part ``cap``: a client tries to take twice its lease, while its neighbour trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.clients import Client, Request, ask, checked, clients, within
from benchmarks.gpu.setting import MB, Setting
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 120.0

_PART_OF_GPU = 8  # a lease is so much of it
_AROUND = "around"
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def measure(setting: Setting) -> dict[str, Any]:
    lease = setting.memory().free_bytes // _PART_OF_GPU
    with clients("ours", 2) as (neighbour, greedy), clients("bare", 1) as (bare,):
        alone = checked(ask(neighbour, _steps(setting, lease, None), setting.deadline), neighbour)
        _marker(setting).unlink()
        neighbour.send(_steps(setting, lease, alone["steps"]))
        while not neighbour.has_answered() and not _marker(setting).exists():
            within(setting.deadline)
            time.sleep(0.02)
        refused = ask(greedy, _hold(setting, lease, greedy), setting.deadline)
        around = ask(greedy, _around_the_allocator(lease), setting.deadline)
        while not neighbour.has_answered(1.0):
            within(setting.deadline)
        beside = checked(neighbour.receive(), neighbour)
        uncapped = ask(bare, _hold(setting, lease, bare), setting.deadline)
    events = setting.trace()
    out = next((event for event in events if event["event"] == "out_of_memory"), {})
    return {
        "lease_mb": round(lease / MB, 1),
        "asked_mb": round(2 * lease / MB, 1),
        "greedy": {
            "error": refused.get("error"),
            "message": refused.get("message"),
            "kind": out.get("kind"),
            "reserved_mb": _mb(out.get("reserved_bytes")),
            "cap_mb": _mb(out.get("cap_bytes")),
            "cap_in_force_mb": _mb(_cap_in_force(events, out.get("lease"))),
            "free_mb": _mb(out.get("free_bytes")),
        },
        "asks_cuda_itself": {
            "cap": next(
                (one["cap"] for one in events if one.get("client") == _AROUND and "cap" in one), None
            ),
            "answer": around.get("answer"),
            "error": around.get("error"),
        },
        "without_a_lease": {
            "error": uncapped.get("error"),
            "taken_mb": _mb(uncapped.get("nbytes")),
        },
        "neighbour": {
            "steps": alone["steps"],
            "loss_alone": alone["loss"],
            "loss_beside": beside["loss"],
            "same": alone["loss"] == beside["loss"],
            "seconds_alone": round(alone["last"] - alone["first"], 2),
            "seconds_beside": round(beside["last"] - beside["first"], 2),
            "trained_on_after_the_error": beside["last"] > refused["ended"] > beside["first"],
        },
        "seconds_of_neighbour": setting.sizes.neighbour_s,
        "measured_s": round(time.monotonic() - setting.began, 1),
    }


def _steps(setting: Setting, lease: int, count: int | None) -> Request:
    options = {"gpu_memory": lease, "name": "neighbour", "env": _DETERMINISTIC}
    args = [setting.model, setting.sizes.neighbour_s, count, str(_marker(setting))]
    return {"do": "steps", "args": args, "options": options}


def _marker(setting: Setting) -> Path:
    """Return the file that the neighbour makes when it begins to train."""
    return setting.folder / "training"


def _hold(setting: Setting, lease: int, client: Client) -> Request:
    options: dict[str, Any] = {}
    if client.name.startswith("ours"):
        options = {"gpu_memory": lease, "on_oom": "fail", "name": "greedy"}
    # Shorter than the neighbour trains, who has just begun.
    args = [2 * lease, setting.sizes.neighbour_s / 4]
    return {"do": "hold", "args": args, "options": options}


def _around_the_allocator(lease: int) -> Request:
    options = {"gpu_memory": lease, "on_oom": "fail", "name": _AROUND}
    return {"do": "take_from_cuda", "args": [2 * lease], "options": options}


def _cap_in_force(events: list[dict[str, Any]], lease: str | None) -> int | None:
    """Return the allocator's cap as it was read back in the worker with this lease."""
    for event in events:
        if event["event"] == "worker_finished" and lease is not None and event.get("lease") == lease:
            for told in event.get("gpus") or ():
                cap: int | None = told["cap_in_force_bytes"]
                return cap
    return None


def _mb(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / MB, 1)


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError where the cap did not hold, or the neighbour noticed."""
    if result["greedy"]["error"] != "GPUOutOfMemoryError":
        raise BenchmarkError(f"cap: twice the lease was not refused as it should be: {result['greedy']}")
    around = result["asks_cuda_itself"]
    if around["cap"] == "driver" and around["answer"] != _OUT_OF_MEMORY:
        raise BenchmarkError(f"cap: the driver did not refuse CUDA's own function twice the lease: {around}")
    if not result["neighbour"]["same"]:
        raise BenchmarkError(f"cap: the neighbour's loss is another one: {result['neighbour']}")


def show(result: dict[str, Any]) -> None:
    def figure(value: float | None, unit: str = "") -> str:
        return "not told" if value is None else f"{value:.0f}{unit}"

    greedy, bare, neighbour = result["greedy"], result["without_a_lease"], result["neighbour"]
    around = result["asks_cuda_itself"]
    table.show(
        f"a client with a lease of {result['lease_mb']:.0f} MB takes {result['asked_mb']:.0f} MB",
        ("way", "result", "had MB", "cap MB", "cap read back MB", "free on the GPU MB"),
        [
            (
                "lease", greedy["error"] or "got it", figure(greedy["reserved_mb"]), figure(greedy["cap_mb"]),
                figure(greedy["cap_in_force_mb"]), figure(greedy["free_mb"]),
            ),
            (
                "lease, cudaMalloc", "refused" if around["answer"] else around["error"] or "got it", "",
                f"by the {around['cap']}", "", "",
            ),
            ("no lease", bare["error"] or "got it", figure(bare["taken_mb"]), "none", "none", ""),
        ],
    )  # fmt: skip
    table.show(
        "its neighbour",
        ("trained", "steps", "seconds", "loss"),
        [
            (way, neighbour["steps"], f"{neighbour[f'seconds_{way}']:.1f}", repr(neighbour[f"loss_{way}"]))
            for way in ("alone", "beside")
        ],
    )
    going_on = "yes" if neighbour["trained_on_after_the_error"] else "no"
    print(
        f"same loss: {'yes' if neighbour['same'] else 'no'}; still training at the error: {going_on}",
        flush=True,
    )
