"""Part ``oversubscribe``: three times more clients than fit on the GPU, all at once.

Each takes nearly its footprint and keeps it for some seconds: in workers that wait for a lease, and in the
same workers without one. How much a client takes is chosen so that about eight fit; nobody tells the leases.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.clients import Client, ask, ask_all, checked, clients
from benchmarks.gpu.setting import MB, Setting
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 150.0

_WAYS = ("leases", "no leases")
_TASK = "benchmarks.gpu.work:hold"
_POINTS = 300  # of the curve of used memory
_ROOM = 0.97  # of the memory for leases: a context may be larger than thought


def measure(setting: Setting) -> dict[str, Any]:
    start = setting.memory()
    nbytes = _bytes_of_a_client(setting)
    with clients("ours", 1) as (client,):
        # As a federation's first call: alone on the GPU, and measured.
        checked(ask(client, _request(setting, nbytes, "ours", client), setting.deadline), client)
    footprint = _footprint()
    fit = (start.total_bytes - start.used_bytes) // footprint
    count = setting.sizes.times * fit
    rows = [_measure(setting, way, count, nbytes) for way in _WAYS]
    return {
        "gpu_mb": round(start.total_bytes / MB, 1),
        "start_mb": round(start.used_bytes / MB, 1),
        "footprint_mb": round(footprint / MB, 1),
        "takes_mb": round(nbytes / MB, 1),
        "fit": fit,
        "clients": count,
        "ways": rows,
    }


def _bytes_of_a_client(setting: Setting) -> int:
    """Return what a client takes, so that leases with their margin fit so many times."""
    from flower_gpu.leases.footprint import DEFAULT_CONTEXT_BYTES
    from flower_gpu.leases.footprint_rule import MARGIN
    from flower_gpu.options import RESERVE

    lease = (setting.memory().free_bytes - RESERVE.resolve()) * _ROOM / setting.sizes.fit
    nbytes = int(lease / (1 + MARGIN)) - DEFAULT_CONTEXT_BYTES
    if nbytes < 64 << 20:
        raise BenchmarkError("too little of the GPU is free for clients of a size that means something")
    return nbytes


def _footprint() -> int:
    from flower_gpu.leases.footprint import Footprints

    found = [peaks for key, peaks in Footprints().entries().items() if key.task.startswith(_TASK)]
    if not found:
        raise BenchmarkError("the first call has left no footprint: the driver did not tell what it used")
    return found[0].peak_bytes


def _measure(setting: Setting, way: str, count: int, nbytes: int) -> dict[str, Any]:
    used: list[tuple[float, float]] = []
    before = len(setting.trace())
    kind = "ours" if way == "leases" else "bare"
    with clients(kind, count) as started:
        if kind == "bare":  # so that both find their fork server running
            checked(
                ask(started[0], _request(setting, 1 << 20, kind, started[0]), setting.deadline), started[0]
            )
        began = time.monotonic()

        def look() -> None:
            used.append((round(time.monotonic() - began, 3), round(setting.used_mb(), 1)))

        work = [(client, _request(setting, nbytes, kind, client)) for client in started]
        replies = ask_all(work, setting.deadline, look=look)
        seconds = time.monotonic() - began
    failed = [reply for reply in replies if "error" in reply]
    full = [reply for reply in failed if reply["out_of_memory"]]
    done = [reply for reply in replies if "error" not in reply]
    events = setting.trace()[before:]
    return {
        "way": way,
        "finished": len(done),
        "out_of_memory": len(full),
        "other_failures": len(failed) - len(full),
        # What a lease caught and ran again would not show as a failure.
        "out_of_memory_in_workers": sum(event["event"] == "out_of_memory" for event in events) or len(full),
        "most_at_a_time": _most([(reply["taken"], reply["released"]) for reply in done]),
        "highest_mb": max((amount for _, amount in used), default=None),
        "seconds": round(seconds, 2),
        "failed_at_s": sorted(round(reply["ended"] - began, 2) for reply in full),
        "messages": sorted({f"{reply['error']}: {reply['message'][:300]}" for reply in failed})[:3],
        "used_mb": _thinned(used),
    }


def _request(setting: Setting, nbytes: int, kind: str, client: Client) -> dict[str, Any]:
    args = [nbytes, setting.sizes.hold_s]
    options = {"name": str(client.number)} if kind == "ours" else {}
    return {"do": "hold", "args": args, "options": options}


def _thinned(used: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return some of the points: of each short time the one with the most memory."""
    size = -(-len(used) // _POINTS)
    return [
        max(used[begin : begin + size], key=lambda one: one[1]) for begin in range(0, len(used), size or 1)
    ]


def _most(spans: list[tuple[float, float]]) -> int:
    """Return how many spans there are at most at one moment."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError where leases let a client fail."""
    for row in result["ways"]:
        if row["way"] == "leases" and row["finished"] != result["clients"]:
            raise BenchmarkError(
                f"oversubscribe: with leases {row['finished']} of {result['clients']} clients finished: "
                f"{row['messages']}"
            )


def show(result: dict[str, Any]) -> None:
    table.show(
        f"{result['clients']} clients of {result['footprint_mb']:.0f} MB at once, where {result['fit']} fit "
        f"(GPU: {result['gpu_mb']:.0f} MB)",
        ("way", "finished", "out of memory", "other failures", "most at a time", "highest MB", "seconds"),
        [
            (
                row["way"],
                row["finished"],
                row["out_of_memory"],
                row["other_failures"],
                row["most_at_a_time"],
                f"{row['highest_mb'] or 0:.0f}",
                f"{row['seconds']:.1f}",
            )
            for row in result["ways"]
        ],
    )
