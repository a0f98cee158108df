"""A process with a lease, or that waits for one, until its standard input ends.

Arguments: label, number of GPUs, and what to ask of each: bytes, a share such as 0.25, or "alone".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.admission import GPUNeed
from flower_gpu.leases.ledger import Claimant, Ledger


def option(gpu: GPU, asked: str) -> GPUNeed:
    if asked == "alone":
        return GPUNeed(gpu.uuid, alone=True)
    if "." in asked:
        return GPUNeed(gpu.uuid, share=float(asked))
    return GPUNeed(gpu.uuid, memory_bytes=int(asked))


def main(label: str, count: str, asked: str) -> None:
    def options(gpus: Sequence[GPU]) -> tuple[GPUNeed, ...]:
        return tuple(option(gpu, asked) for gpu in gpus)

    ledger = Ledger()
    print("asks", flush=True)
    claimant = Claimant(options, count=int(count), label=label)
    ticket = ledger.acquire(claimant, deadline=time.monotonic() + 60)
    print("granted", flush=True)
    sys.stdin.read()
    ledger.release(ticket)


if __name__ == "__main__":
    main(*sys.argv[1:])
