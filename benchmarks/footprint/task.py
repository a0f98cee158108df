"""What a worker of this benchmark does: it takes memory of the stub GPU, and holds it for a while."""

from __future__ import annotations

import os
import time

import nvml_stub

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
