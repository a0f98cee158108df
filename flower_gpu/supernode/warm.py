"""Have the fork server ready, with Flower imported, before the first message comes."""

from __future__ import annotations

import sys
from contextlib import suppress

from flower_gpu.errors import FlowerGPUError
from flower_gpu.isolation import start, worker
from flower_gpu.isolation.call import Call

_TASK = "flower_gpu.flower.clientapp:warm"
_TIMEOUT_S = 60.0


def up() -> None:
    """Start it, and let it learn what a message needs; a failure is told by the first message."""
    if start.choose("auto") == "forkserver":
        for _ in range(2):  # what the first one had to import is there for the second
            with suppress(FlowerGPUError):
                worker.run(Call(_TASK, label="warm-up"), "forkserver", _TIMEOUT_S)


if __name__ == "__main__":
    up()
    sys.exit(0)
