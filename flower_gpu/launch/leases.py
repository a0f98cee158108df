"""What a trace tells of leases: who had how much of which GPU, and how long for it they waited."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from flower_gpu.gpu.request import format_bytes

#: How a call that ran out of GPU memory went on: ``then`` in its event.
_THEN: Final = {"again": "ran again", "on the CPU": "ran on the CPU", "failed": "failed"}


class Leases:
    """The leases of a run, gathered from its events."""

    def __init__(self) -> None:
        self._granted: dict[str, dict[str, Any]] = {}
        self._out_of_memory: Counter[str] = Counter()

    @property
    def were_there(self) -> bool:
        """Whether there has been any so far."""
        return bool(self._granted)

    def see(self, event: Mapping[str, Any]) -> None:
        """Take in an event; those about other things are ignored."""
        match event.get("event"):
            case "lease_granted":
                self._granted[str(event.get("lease"))] = {
                    "gpus": [_gpu(gpu) for gpu in _mappings(event.get("gpus"))],
                    "waited_s": finite_number(event.get("waited_s")) or 0.0,
                }
            case "out_of_memory":
                self._out_of_memory[str(event.get("then"))] += 1
            case _:
                pass

    def of_worker(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a worker's event and its lease tell.

        Returns
        -------
        dict
            ``gpus``: ``index``, ``uuid``, ``memory_bytes`` (leased) and ``peak_bytes`` (used; None where not
            known) of each; ``waited_s``. Empty if it has no lease.
        """
        lease = self._granted.get(str(event.get("lease")))
        if lease is None:
            return {}
        peaks = {gpu.get("uuid"): gpu.get("peak_bytes") for gpu in _mappings(event.get("gpus"))}
        gpus = [{**gpu, "peak_bytes": finite_number(peaks.get(gpu["uuid"]))} for gpu in lease["gpus"]]
        return {"gpus": gpus, "waited_s": lease["waited_s"]}

    def gpu_number(self, event: Mapping[str, Any]) -> Any:
        """Return the number of the GPU that an event with lease and ``uuid`` is about; None: not known."""
        lease = self._granted.get(str(event.get("lease")), {"gpus": []})
        return next((gpu["index"] for gpu in lease["gpus"] if gpu["uuid"] == event.get("uuid")), None)

    def summary(self) -> dict[str, Any]:
        """Return the sums.

        Returns
        -------
        dict
            ``count``; ``waited_s`` by all together and ``longest_wait_s``; ``out_of_memory``: how many calls
            ran out of GPU memory, by what followed (``"again"``, ``"on the CPU"``, ``"failed"``).
        """
        waits = [lease["waited_s"] for lease in self._granted.values()]
        return {
            "count": len(waits),
            "waited_s": round(sum(waits), 3),
            "longest_wait_s": max(waits, default=0.0),
            "out_of_memory": dict(self._out_of_memory),
        }


def by_client(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sum up a result's workers by client, for a table.

    Returns
    -------
    list of dict
        In the order of their names, the server last: ``client``; ``gpus``, ``lease`` and ``peak`` as texts;
        ``calls`` in all, ``on_cpu`` of them without a lease, ``waited_s`` of all and ``longest_wait_s``.
    """
    workers: dict[str, list[Mapping[str, Any]]] = {}
    for worker in result["workers"]:
        workers.setdefault(str(worker["client"]), []).append(worker)
    rows = []
    for client in sorted(workers, key=_client_order):
        parts = [part for worker in workers[client] for part in worker["gpus"]]
        waits = [worker["waited_s"] for worker in workers[client]]
        peaks = [int(part["peak_bytes"]) for part in parts if part["peak_bytes"]]
        rows.append(
            {
                "client": client,
                "calls": len(waits),
                "on_cpu": sum(not worker["gpus"] for worker in workers[client]),
                "gpus": ", ".join(map(str, sorted({part["index"] for part in parts}))) or "-",
                "lease": _span(part["memory_bytes"] for part in parts),
                "peak": format_bytes(max(peaks)) if peaks else "-",
                "waited_s": sum(waits),
                "longest_wait_s": max(waits),
            }
        )
    return rows


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Say the sums of :meth:`Leases.summary` in a line, and in another one how often memory ran out."""
    lines = [
        f"leases      {summary['count']}, waited for {summary['waited_s']:.1f} s in all, "
        f"{summary['longest_wait_s']:.1f} s at most"
    ]
    counts = summary["out_of_memory"]
    if counts:
        what = ", ".join(f"{count} {_THEN.get(then, then)}" for then, count in counts.items())
        lines.append(f"memory      ran out {sum(counts.values())} times: {what}")
    return lines


def out_of_memory_line(label: str, event: Mapping[str, Any], leases: Leases) -> str:
    """Say of one call that it ran out of memory, and what follows."""
    number = leases.gpu_number(event)
    where = "its GPU" if number is None else f"GPU {number}"
    then = str(event.get("then"))
    follows = {"again": "it runs again", "on the CPU": "it runs again on the CPU", "failed": "it has failed"}
    cap = finite_number(event.get("cap_bytes"))
    of = f" with {format_bytes(int(cap))}" if cap is not None else ""
    return f"{label} ran out of memory on {where}{of}: {follows.get(then, then)}"


def finite_number(value: object) -> float | None:
    """Return a number that JSON has, too; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _gpu(told: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": told.get("index"), "uuid": told.get("uuid"), "memory_bytes": told.get("memory_bytes")}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _span(sizes: Any) -> str:
    """Write sizes as one text: the smallest and the largest, where they differ as they are shown."""
    known = sorted(size for size in sizes if isinstance(size, int))
    if not known:
        return "-"
    least, most = format_bytes(known[0]), format_bytes(known[-1])
    return least if least == most else f"{least} to {most}"


def _client_order(name: str) -> tuple[int, int, str]:
    if name.isdecimal():
        return (0, int(name), name)
    return (2 if name == "server" else 1, 0, name)
