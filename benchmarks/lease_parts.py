"""Runs the parts of leases.py on the stub host of its environment: one request and one answer per line."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import lease_crowd
import lease_waiting

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "crowd": lease_crowd.measure,
    "alone": lease_waiting.measure_alone,
    "waiting": lease_waiting.measure,
}


def main() -> None:
    numbers = random.Random(int(sys.argv[1]))
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        part = PARTS[request.pop("part")]
        print(json.dumps(part(numbers=numbers, **request)), flush=True)


if __name__ == "__main__":
    main()
