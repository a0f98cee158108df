"""64 clients that name no size share one stub GPU on which five of them fit: how well it is used.

The first call runs alone and its peak is learned; then as many run at a time as fit. Everything is real but
the GPU: client processes, workers, ledger, the driver's library as pynvml sees it. What a worker allocates is
counted by the stub; one that finds the GPU full fails as CUDA does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shared import stub, table
from benchmarks.shared.driver import Figures, Options, Parser, positive, run
from benchmarks.shared.processes import ROOT, BenchmarkError
from benchmarks.shared.stub import GIB
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.state import State

_TAKES_BYTES = int(2.8 * GIB)  # with the margin so many fit on 16 GiB, next to the reserve:
_FIT = 5
_LOOK_S = 0.02
_LONGEST_S = 600.0


def main() -> int:
    parser = Parser("footprint", __doc__)
    parser.add_argument("--clients", type=positive, default=64, metavar="N", help="how many (default: 64)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each call takes (default: 1)")
    return run(parser, parser.parse(), {"footprint": _measure}, {})


def _measure(options: Options, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(prefix="fgpu-bench-") as name:
        folder = Path(name)
        stub.move_to(stub.host(folder))
        os.environ["FLOWER_GPU_RUN_DIR"] = name
        arguments = [str(_TAKES_BYTES), str(options.seconds)]
        began = time.monotonic()
        clients = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.footprint.task", str(number), *arguments], cwd=ROOT
            )
            for number in range(options.clients)
        ]
        try:
            looks = _watch(clients, began)
        finally:
            for client in clients:
                client.kill()
                client.wait()
        events = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    codes = [client.returncode for client in clients]
    found = _figures(events, looks, time.monotonic() - began, codes)
    table.show_figures(f"{options.clients} clients, auto", found)
    figures |= found
    is_right = found["finished"] == options.clients and not found["out_of_memory"]
    if not is_right or found["most_at_a_time"] > _FIT:
        raise BenchmarkError(f"not all {options.clients} clients finished, {_FIT} at a time")


def _watch(clients: list[subprocess.Popen[bytes]], began: float) -> list[tuple[float, State]]:
    ledger = Ledger()
    looks = []
    while any(client.poll() is None for client in clients):
        if time.monotonic() - began > _LONGEST_S:
            break
        looks.append((time.monotonic() - began, ledger.status()))
        time.sleep(_LOOK_S)
    return looks


def _figures(
    events: list[dict[str, Any]], looks: list[tuple[float, State]], seconds: float, codes: list[int]
) -> dict[str, Any]:
    leases = [event for event in events if event["event"] == "lease_granted"]
    alone = [event for event in leases if event["alone"]]
    learned = next((event["time"] for event in leases if not event["alone"]), None)
    busy = [
        state.leased_bytes(state.gpus[0].uuid) / (16 * GIB - (256 << 20))
        for _, state in looks
        if state.waiting and state.gpus
    ]
    return {
        "clients": len(codes),
        "finished": codes.count(0),
        "out_of_memory": sum(event["event"] == "out_of_memory" for event in events),
        "calls_alone": len(alone),
        "most_at_a_time": max((len(state.holders) for _, state in looks), default=0),
        "leased_while_work_waits_percent": round(100 * sum(busy) / max(1, len(busy)), 1),
        "first_learned_after_s": None if learned is None else round(learned - events[0]["time"], 2),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
