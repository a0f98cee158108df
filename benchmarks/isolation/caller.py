"""A caller that holds weights and runs one call per request.

It imports as little as possible, because multiprocessing imports it again in each spawned process.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.isolation.ways import WAYS
from benchmarks.shared import weights as sample
from benchmarks.shared.member import Answer, serve, wait_until_gone


def prepare(way_name: str, size_mb: float) -> Answer:
    way = WAYS[way_name]
    run = way.prepare()
    weights = sample.make(size_mb)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        added = 1 if request["call"] == "update" else 0
        began = time.perf_counter()
        pid, result = run(request["call"], weights)
        wait_until_gone(pid)
        seconds = time.perf_counter() - began
        sample.check(result, size_mb, added)
        if added and way_name == "in-process":
            # This call has updated the caller's own arrays.
            for array in weights:
                array -= 1
        sample.check(weights, size_mb, 0)
        time.sleep(way.settle_s)
        return {"seconds": seconds}

    return answer


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1], float(sys.argv[2])))
