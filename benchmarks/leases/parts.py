"""Runs the parts of the benchmark on the stub host of its environment, in a process that is light to fork."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.leases import crowd, waiting
from benchmarks.shared.member import serve

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "crowd": crowd.measure,
    "alone": waiting.measure_alone,
    "waiting": waiting.measure,
}


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    numbers = random.Random(int(sys.argv[1]))
    return lambda request: PARTS[request.pop("part")](numbers=numbers, **request)


if __name__ == "__main__":
    serve(prepare)
