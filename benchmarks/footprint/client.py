"""One client, of one call: ``python -m benchmarks.footprint.client NUMBER BYTES SECONDS``."""

from __future__ import annotations

import sys

import flower_gpu


def main(number: str, size: str, seconds: str) -> None:
    flower_gpu.run_in_worker("benchmarks.footprint.task:train", int(size), float(seconds), name=number)


if __name__ == "__main__":
    main(*sys.argv[1:])
