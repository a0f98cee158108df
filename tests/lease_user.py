"""A process that requests a lease and holds it until its standard input is closed.

Arguments: label, number of GPUs, and the request for each GPU: bytes, a share such as 0.25, or "alone".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.admission import GPUNeed
from flower_gpu.leases.ledger import Claimant, Ledger


def need_for(gpu: GPU, request: str) -> GPUNeed:
    if request == "alone":
        return GPUNeed(gpu.uuid, alone=True)
    if "." in request:
        return GPUNeed(gpu.uuid, share=float(request))
    return GPUNeed(gpu.uuid, memory_bytes=int(request))


def main(label: str, count: str, request: str) -> None:
    def needs(gpus: Sequence[GPU]) -> tuple[GPUNeed, ...]:
        return tuple(need_for(gpu, request) for gpu in gpus)

    ledger = Ledger()
    print("asks", flush=True)
    claimant = Claimant(needs, count=int(count), label=label)
    ticket = ledger.acquire(claimant, deadline=time.monotonic() + 60)
    print("granted", flush=True)
    sys.stdin.read()
    ledger.release(ticket)


if __name__ == "__main__":
    main(*sys.argv[1:])
