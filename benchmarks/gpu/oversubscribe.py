"""Part ``oversubscribe``: three times more clients than fit on the GPU, all at once.

Each client takes nearly its footprint and holds it for some seconds: in workers that wait for a lease, and in
workers without leases. The size of a client is chosen so that about eight fit. The leases have to learn it.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.clients import Client, ask, ask_all, checked, clients
from benchmarks.gpu.setting import MB, Setting
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 150.0

_WAYS = {"leases": "ours", "no leases": "bare"}
_TASK = "benchmarks.gpu.work:hold"
_MAX_POINTS = 300
#: Planned share of the memory for leases. A CUDA context may be larger than estimated.
_PLANNED = 0.97
_MIN_BYTES = 64 << 20


def measure(setting: Setting) -> dict[str, Any]:
    start = setting.memory()
    nbytes = _client_bytes(setting)
    with clients("ours", 1) as (client,):
        # The first call of a federation runs alone on the GPU and is measured.
        checked(ask(client, _request(setting, nbytes, client), setting.deadline), client)
    footprint = _footprint_bytes()
    fit = (start.total_bytes - start.used_bytes) // footprint
    count = setting.sizes.times * fit
    return {
        "gpu_mb": round(start.total_bytes / MB, 1),
        "start_mb": round(start.used_bytes / MB, 1),
        "footprint_mb": round(footprint / MB, 1),
        "client_mb": round(nbytes / MB, 1),
        "fit": fit,
        "clients": count,
        "ways": [_measure(setting, way, count, nbytes) for way in _WAYS],
    }


def _client_bytes(setting: Setting) -> int:
    """Return the size of a client for which the planned number of leases fit, with their margin."""
    from flower_gpu.leases.footprint import DEFAULT_CONTEXT_BYTES
    from flower_gpu.leases.footprint_rule import MARGIN
    from flower_gpu.options import RESERVE

    lease = (setting.memory().free_bytes - RESERVE.resolve()) * _PLANNED / setting.sizes.fit
    nbytes = int(lease / (1 + MARGIN)) - DEFAULT_CONTEXT_BYTES
    if nbytes < _MIN_BYTES:
        raise BenchmarkError("oversubscribe: too little memory of the GPU is free")
    return nbytes


def _footprint_bytes() -> int:
    from flower_gpu.leases.footprint import Footprints

    learned = [peaks for key, peaks in Footprints().entries().items() if key.task.startswith(_TASK)]
    if not learned:
        raise BenchmarkError("oversubscribe: the first call has no footprint: the driver reported no memory")
    return learned[0].peak_bytes


def _measure(setting: Setting, way: str, count: int, nbytes: int) -> dict[str, Any]:
    used: list[tuple[float, float]] = []
    before = len(setting.trace())
    with clients(_WAYS[way], count) as started:
        if way == "no leases":
            # A warm-up, because the fork server of the other way is already running.
            client = started[0]
            checked(ask(client, _request(setting, 1 << 20, client), setting.deadline), client)
        began = time.monotonic()

        def look() -> None:
            used.append((round(time.monotonic() - began, 3), round(setting.used_mb(), 1)))

        work = [(client, _request(setting, nbytes, client)) for client in started]
        replies = ask_all(work, setting.deadline, look=look)
        seconds = time.monotonic() - began
    failed = [reply for reply in replies if "error" in reply]
    full = [reply for reply in failed if reply["out_of_memory"]]
    finished = [reply for reply in replies if "error" not in reply]
    events = setting.trace()[before:]
    return {
        "way": way,
        "finished": len(finished),
        "out_of_memory": len(full),
        "other_failures": len(failed) - len(full),
        # Includes calls that ran out of memory and then succeeded in a second attempt.
        "out_of_memory_in_workers": sum(event["event"] == "out_of_memory" for event in events) or len(full),
        "max_at_a_time": _max_overlap([(reply["taken"], reply["released"]) for reply in finished]),
        "peak_mb": max((mb for _, mb in used), default=None),
        "seconds": round(seconds, 2),
        "failed_at_s": sorted(round(reply["ended"] - began, 2) for reply in full),
        "messages": sorted({f"{reply['error']}: {reply['message'][:300]}" for reply in failed})[:3],
        "used_mb": _thinned(used),
    }


def _request(setting: Setting, nbytes: int, client: Client) -> dict[str, Any]:
    options = {"name": str(client.number)} if client.way == "ours" else {}
    return {"do": "hold", "args": [nbytes, setting.sizes.hold_s], "options": options}


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the highest point of each of some 300 intervals."""
    size = -(-len(points) // _MAX_POINTS) or 1
    return [
        max(points[begin : begin + size], key=lambda point: point[1]) for begin in range(0, len(points), size)
    ]


def _max_overlap(spans: list[tuple[float, float]]) -> int:
    """Return the largest number of spans that overlap."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    highest = current = 0
    for _, change in changes:
        current += change
        highest = max(highest, current)
    return highest


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError if a client with a lease failed."""
    for row in result["ways"]:
        if row["way"] == "leases" and row["finished"] != result["clients"]:
            raise BenchmarkError(
                f"oversubscribe: with leases {row['finished']} of {result['clients']} clients finished: "
                f"{row['messages']}"
            )


def show(result: dict[str, Any]) -> None:
    clients = f"{result['clients']} clients of {result['footprint_mb']:.0f} MB at once"
    columns = "way finished out_of_memory other_failures max_at_a_time peak_mb seconds"
    table.show(f"{clients}, where {result['fit']} fit", result["ways"], columns)
