"""A worker's GPU memory, from the figures of its allocator and of the driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.leases.footprint_rule import LEAST_CONTEXT_BYTES, Measured
from flower_gpu.leases.lease import Share

if TYPE_CHECKING:
    from flower_gpu.frameworks.framework import Figures
    from flower_gpu.gpu.gpus import GPU


@dataclass
class Use:
    """The measured memory of this worker on one GPU."""

    share: Share  # the worker's share of the GPU
    peak_bytes: int | None = None  # measured peak; None without any measurement
    context_bytes: int | None = None  # memory of this process outside of its allocator, at the last query
    outside_bytes: int | None = None  # measured peak of such memory of all processes of this worker
    # True if the driver reports this worker's memory; None before the first query
    is_reported: bool | None = None

    def see(self, used_bytes: int) -> None:
        """Record the memory in use at this moment."""
        self.peak_bytes = max(self.peak_bytes or 0, used_bytes)

    def beyond(self, reserved_bytes: int) -> int:
        """Return the bytes that the worker uses if its allocator has ``reserved_bytes``."""
        if self.outside_bytes is not None:
            return reserved_bytes + self.outside_bytes
        # Before the first measurement, the lease's own estimate counts.
        return reserved_bytes + max(0, self.share.memory_bytes - self.share.cap_bytes)

    def ask(self, gpu: GPU, of_group: int | None = None) -> dict[int, int]:
        """Record the driver's figures of a GPU. Return the bytes that this worker uses, by process.

        The result is empty if the driver has no figures. A process that is not listed uses no memory, unless
        the driver reports memory in use that belongs to no listed process.

        ``of_group``: bytes of this worker's control group, if any. They include all its processes.
        """
        if of_group is not None:
            self.is_reported = True
            self.see(of_group)
            return {os.getpid(): of_group}
        own_processes = {
            process.pid: process.used_bytes for process in gpu.processes or () if _is_of_worker(process.pid)
        }
        used_by_pid = {pid: used for pid, used in own_processes.items() if used is not None}
        self.is_reported = gpu.processes is not None and len(used_by_pid) == len(own_processes)
        if self.is_reported and os.getpid() not in own_processes:
            self.is_reported = (gpu.unlisted_bytes() or 0) < LEAST_CONTEXT_BYTES
            used_by_pid.setdefault(os.getpid(), 0)
        if not self.is_reported:
            # An earlier peak is too small, because a process was not listed then either.
            self.peak_bytes = None
            return {}
        self.see(sum(used_by_pid.values()))
        return used_by_pid

    def split(self, used_by_pid: dict[int, int], reserved_bytes: int) -> None:
        """Record the memory outside of the allocator, from the driver's figures.

        ``used_by_pid``: the driver's figures, as returned by :meth:`ask`.
        ``reserved_bytes``: memory of the allocator.
        """
        context = used_by_pid[os.getpid()] - reserved_bytes
        if context > 0:
            self.context_bytes = context
            self.outside_bytes = max(self.outside_bytes or 0, sum(used_by_pid.values()) - reserved_bytes)

    def as_event(
        self, figures: Figures | None, figures_before: Figures | None, in_force: int | None
    ) -> dict[str, Any]:
        """Return the figures for the caller.

        ``figures``: figures of the framework after the task.
        ``figures_before``: figures of the framework before the task.
        ``in_force``: bytes of the limit that was in force.
        """
        reserved = figures.peak_reserved_bytes if figures is not None else 0
        if reserved:
            self.see(self.beyond(reserved))
        retries = (
            figures.num_alloc_retries
            - (figures_before.num_alloc_retries if figures_before is not None else 0)
            if figures
            else None
        )
        return {
            "uuid": self.share.uuid,
            "peak_bytes": self.peak_bytes,
            "reserved_peak_bytes": None if figures is None else reserved,
            "allocated_peak_bytes": None if figures is None else figures.peak_allocated_bytes,
            "reserved_before_bytes": 0 if figures_before is None else figures_before.reserved_bytes,
            "alloc_retries": retries,
            "context_bytes": self.context_bytes,
            "outside_bytes": self.outside_bytes,
            "told_by_driver": self.is_reported,
            "lease_bytes": self.share.memory_bytes,
            "cap_bytes": self.share.cap_bytes,
            "cap_in_force_bytes": in_force,
        }


@dataclass
class ThisWorker:
    """The state that this worker process keeps from one call to the next."""

    uses: dict[str, Use] = field(default_factory=dict)  # measurements of earlier calls, by UUID
    has_ranks: bool = False  # True if ranks of the current call report its GPUs


THIS_WORKER: Final = ThisWorker()


def least_bytes(event: Mapping[str, Any], share: Share) -> int:
    """Return the bytes that a call would have needed when it ran out of GPU memory, with its context."""
    without_context = share.memory_bytes - (event.get("cap_bytes") or share.memory_bytes)
    outside = max(without_context, event.get("outside_bytes") or 0)
    return (event.get("reserved_bytes") or 0) + (event.get("asked_bytes") or 0) + outside


def in_allocator(event: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the bytes that the allocator needed and the bytes of tensors, or None without an allocator."""
    if event.get("allocated_bytes") is None:
        return None
    asked = event.get("asked_bytes") or 0
    # When the event is sent, some tensors may have been freed already.
    tensors = max(event["allocated_bytes"] + asked, event.get("allocated_peak_bytes") or 0)
    return (event.get("reserved_bytes") or 0) + asked, tensors


def measured(event: Mapping[str, Any], share: Share, least_bytes: int) -> Measured:
    """Return the figures of a call from a worker's ``gpu_memory`` event."""
    outside = event.get("outside_bytes")
    # Without reserved memory, the figures of this allocator do not count, because another framework was used.
    reserved = event.get("reserved_peak_bytes") or None
    return Measured(
        peak_bytes=max(event["peak_bytes"], least_bytes),
        outside_bytes=share.memory_bytes - share.cap_bytes if outside is None else outside,
        reserved_bytes=reserved,
        allocated_bytes=event.get("allocated_peak_bytes") if reserved else None,
        cap_bytes=share.cap_bytes,
        num_retries=event.get("alloc_retries") or 0,
        is_first=not event.get("reserved_before_bytes"),
    )


def _is_of_worker(pid: int) -> bool:
    """Return True for a process of this worker. A worker leads a process group, which its children are in."""
    if pid == os.getpid():
        return True
    # The process may be gone, or belong to another account.
    with suppress(OSError):
        return os.getpid() == os.getpgrp() == os.getpgid(pid)
    return False
