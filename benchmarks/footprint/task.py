"""What a worker does: it takes memory of the stub GPU and holds it for a while. And a client of one call.

``python -m benchmarks.footprint.task NUMBER BYTES SECONDS`` is that client.
"""

from __future__ import annotations

import os
import sys
import time

import nvml_stub

import flower_gpu
from flower_gpu.leases.lease import Lease


def train(size: int, seconds: float) -> int:
    lease = Lease.from_environment(os.environ)
    assert lease is not None
    share = lease.shares[0]
    nvml_stub.allocate(share.uuid, size)
    if nvml_stub.used(share.uuid) > share.total_bytes:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
    time.sleep(seconds)
    return size


if __name__ == "__main__":
    number, nbytes, hold_s = sys.argv[1:]
    flower_gpu.run_in_worker("benchmarks.footprint.task:train", int(nbytes), float(hold_s), name=number)
