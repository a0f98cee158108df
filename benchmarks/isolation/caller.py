"""One caller: holds weights and runs a call whenever the driver asks.

It imports as little as it can: the ways with multiprocessing run it once more in each process they spawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.isolation.ways import WAYS
from benchmarks.shared import weights as sample
from benchmarks.shared.member import peak_mb, reset_peak, serve, wait_until_gone


def prepare(way_name: str, size_mb: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    way = WAYS[way_name]
    run = way.prepare()
    weights = sample.make(size_mb)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        added = 1 if request["call"] == "update" else 0
        reset_peak()
        began = time.perf_counter()
        pid, result = run(request["call"], weights)
        wait_until_gone(pid)
        reply = {"seconds": time.perf_counter() - began, "peak_mb": peak_mb()}
        sample.check(result, size_mb, added)
        if added and way_name == "in-process":  # there they are the caller's own
            for array in weights:
                array -= 1
        sample.check(weights, size_mb, 0)
        time.sleep(way.settle_s)
        return {**reply, "verified": True}

    return answer


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1], float(sys.argv[2])))
