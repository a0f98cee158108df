"""A worker's use of GPUs, by the figures of its allocator, of the driver and of its ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.leases.footprint_rule import LEAST_CONTEXT_BYTES, Measured
from flower_gpu.leases.lease import Share
from flower_gpu.workers import events

if TYPE_CHECKING:
    from flower_gpu.frameworks.framework import Figures
    from flower_gpu.gpu.gpus import GPU


@dataclass
class Use:
    """The memory of one GPU that this worker uses, as far as was seen."""

    share: Share  # what it may use
    peak_bytes: int | None = None  # the most that was seen; None: nobody has told anything
    context_bytes: int | None = None  # of this process beyond its allocator, when the driver was asked last
    outside_bytes: int | None = None  # the most that was seen so, of all processes of this worker
    is_told: bool | None = None  # whether the driver tells what this worker uses; None: it was not asked

    def see(self, used_bytes: int) -> None:
        """Note the use at this moment."""
        self.peak_bytes = max(self.peak_bytes or 0, used_bytes)

    def beyond(self, reserved_bytes: int) -> int:
        """Return the use of the process if its allocator has so much: with the memory outside of it."""
        if self.outside_bytes is not None:
            return reserved_bytes + self.outside_bytes
        return reserved_bytes + max(0, self.share.memory_bytes - self.share.cap_bytes)  # as the lease has it

    def ask(self, gpu: GPU, of_group: int | None = None) -> dict[int, int]:
        """Note the driver's figures; return this worker's use by process, empty where the driver has none.

        A process that is not listed uses nothing, unless somebody uses memory who is not listed.

        ``of_group``: the use of this worker's control group, where it has one: nobody is missing in that.
        """
        if of_group is not None:
            self.is_told = True
            self.see(of_group)
            return {os.getpid(): of_group}
        ours = {one.pid: one.used_bytes for one in gpu.processes or () if _is_of_worker(one.pid)}
        told = {pid: used for pid, used in ours.items() if used is not None}
        self.is_told = gpu.processes is not None and len(told) == len(ours)
        if self.is_told and os.getpid() not in ours:
            self.is_told = (gpu.unlisted_bytes() or 0) < LEAST_CONTEXT_BYTES
            told.setdefault(os.getpid(), 0)
        if not self.is_told:
            self.peak_bytes = None  # that of before, as of a process that was not listed yet, is too little
            return {}
        self.see(sum(told.values()))
        return told

    def split(self, told: dict[int, int], reserved_bytes: int) -> None:
        """Note how much of the driver's figures is outside of the allocator, which has ``reserved_bytes``."""
        context = told[os.getpid()] - reserved_bytes
        if context > 0:
            self.context_bytes = context
            self.outside_bytes = max(self.outside_bytes or 0, sum(told.values()) - reserved_bytes)

    def as_event(self, own: Figures | None, before: Figures | None, in_force: int | None) -> dict[str, Any]:
        """Return the figures for the caller."""
        reserved = own.peak_reserved_bytes if own is not None else 0
        if reserved:
            self.see(self.beyond(reserved))
        retries = (
            own.num_alloc_retries - (before.num_alloc_retries if before is not None else 0) if own else None
        )
        return {
            "uuid": self.share.uuid,
            "peak_bytes": self.peak_bytes,
            "reserved_peak_bytes": None if own is None else reserved,
            "allocated_peak_bytes": None if own is None else own.peak_allocated_bytes,
            "reserved_before_bytes": 0 if before is None else before.reserved_bytes,
            "alloc_retries": retries,
            "context_bytes": self.context_bytes,
            "outside_bytes": self.outside_bytes,
            "told_by_driver": self.is_told,
            "lease_bytes": self.share.memory_bytes,
            "cap_bytes": self.share.cap_bytes,
            "cap_in_force_bytes": in_force,
        }


class RankFigures:
    """Collects the figures of ranks, each of its own GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}
        self._gpus: dict[str, dict[str, Any]] = {}
        self._with_cuda: set[int] = set()
        self._ran_out = False

    def take(self, rank: int, event: Mapping[str, Any]) -> bool:
        """Take an event if it is about a GPU; tell whether it was."""
        kind = event.get("event")
        fields = {key: value for key, value in event.items() if key != "event"}
        with self._lock:
            if kind == "gpu_used":
                self._used.update(fields["used"])
            elif kind == "gpu_memory":
                self._gpus.update({told["uuid"]: told for told in fields["gpus"]})
                if fields["cuda"]:
                    self._with_cuda.add(rank)
            elif kind == "cuda_started":
                if not self._with_cuda:  # of the call, which is the first of them
                    events.send("cuda_started")
                self._with_cuda.add(rank)
            elif kind == "out_of_memory":
                if not self._ran_out:
                    events.send("out_of_memory", **fields, rank=rank)
                self._ran_out = True
            elif kind == "no_cuda":
                events.send("no_cuda", **fields)
            else:
                return kind in ("task_started", "worker_result")
        return True

    def used(self) -> dict[str, int]:
        """Return the bytes that ranks use, by UUID."""
        with self._lock:
            return dict(self._used)

    def gpu(self, uuid: str) -> dict[str, Any] | None:
        """Return a rank's ``gpu_memory`` figures of a GPU."""
        with self._lock:
            return self._gpus.get(uuid)

    @property
    def is_on_cuda(self) -> bool:
        """Whether a rank has used CUDA."""
        return bool(self._with_cuda)


@dataclass
class ThisWorker:
    """What this process knows as a worker, from one call to the next."""

    uses: dict[str, Use] = field(default_factory=dict)  # by UUID: what last looks of earlier calls have found
    ranks: RankFigures | None = None  # what ranks of its call have told; None where that has no ranks


THIS_WORKER: Final = ThisWorker()


def least_bytes(told: Mapping[str, Any], share: Share) -> int:
    """Return how much of a GPU a call that ran out of memory would have needed to go on, context included."""
    without_context = share.memory_bytes - (told.get("cap_bytes") or share.memory_bytes)
    outside = max(without_context, told.get("outside_bytes") or 0)
    return (told.get("reserved_bytes") or 0) + (told.get("asked_bytes") or 0) + outside


def in_allocator(told: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the memory that the allocator needed, and that of tensors; None without an allocator."""
    if told.get("allocated_bytes") is None:
        return None
    asked = told.get("asked_bytes") or 0
    # When this is told, some of the tensors may be gone already.
    tensors = max(told["allocated_bytes"] + asked, told.get("allocated_peak_bytes") or 0)
    return (told.get("reserved_bytes") or 0) + asked, tensors


def measured(told: Mapping[str, Any], share: Share, least_bytes: int) -> Measured:
    """Return the figures of a call from a worker's ``gpu_memory`` event."""
    outside = told.get("outside_bytes")
    reserved = told.get("reserved_peak_bytes") or None  # None: figures of another framework count
    return Measured(
        peak_bytes=max(told["peak_bytes"], least_bytes),
        outside_bytes=share.memory_bytes - share.cap_bytes if outside is None else outside,
        reserved_bytes=reserved,
        allocated_bytes=told.get("allocated_peak_bytes") if reserved else None,
        cap_bytes=share.cap_bytes,
        num_retries=told.get("alloc_retries") or 0,
        is_first=not told.get("reserved_before_bytes"),
    )


def _is_of_worker(pid: int) -> bool:
    """Tell whether this is a process of this worker: that leads a group, and its children are in it."""
    if pid == os.getpid():
        return True
    with suppress(OSError):  # it is gone, or another account's
        return os.getpid() == os.getpgrp() == os.getpgid(pid)
    return False
