"""The cap of frameworks: their allocators take no more of a GPU than the lease, without the CUDA context."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from flower_gpu import frameworks
from flower_gpu.calls.environment import fixed
from flower_gpu.calls.grants import memory_use
from flower_gpu.calls.grants.grant import Grant
from flower_gpu.frameworks.framework import Cap
from flower_gpu.leases.lease import Lease
from flower_gpu.workers import own_process


class AllocatorCap(Grant):
    """The limit of the frameworks' allocators, and the measurement of what a task takes."""

    def of_lease(self, lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Set the cap in the settings of frameworks. The user's own settings still apply, also a smaller cap.

        Raises ConfigError if the user's own cap is no number.
        """
        return {} if lease is None else frameworks.environment(_caps(lease), environ)

    @contextmanager
    def in_worker(self, lease: Lease | None) -> Iterator[None]:
        """Cap each framework as soon as it is imported, and measure memory until the task ends."""
        if lease is None:
            yield
            return
        caps = _caps(lease)
        rules = frameworks.rules(caps, self.of_lease(lease, os.environ).keys() & os.environ.keys())
        with (
            nullcontext() if own_process.is_inside() else fixed(rules),
            frameworks.held_to(caps) as holds,
            memory_use.measured(lease, holds),
        ):
            yield


def _caps(lease: Lease) -> list[Cap]:
    """Return the limit of allocators on each GPU of a lease.

    If the driver caps the worker, CUDA shows the cap as the total memory of the GPU.
    """
    return [
        Cap(share.cap_bytes, share.memory_bytes if lease.by_driver else share.total_bytes)
        for share in lease.shares
    ]
