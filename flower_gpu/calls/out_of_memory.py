"""The retry of a call that ran out of GPU memory: with more of a GPU, with a whole GPU, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flower_gpu.calls.gpu_use import least_bytes
from flower_gpu.leases.footprint_rule import needed_bytes
from flower_gpu.leases.lease import Lease, LeaseRequest, Share
from flower_gpu.printable import format_bytes

_GROWTHS = 2  # number of tries with more memory, before a try that is alone on a GPU
_MORE = 2.0  # factor from one lease to the next

_KINDS = {
    "over_cap": "it took more than its lease",
    "card_full": "the GPU itself was full",
    "unclear": "the GPU had room, but not in one piece, or the driver does not report why",
}


def next_request(
    event: Mapping[str, Any], lease: Lease, requests: Sequence[LeaseRequest], on_oom: str
) -> LeaseRequest | None:
    """Return the request of the next try after an ``out_of_memory`` event, or None if no try would help.

    ``event``: fields of the event.
    ``requests``: requests of the tries so far.
    """
    last = requests[-1]
    if on_oom == "fail" or (last.alone and last.memory_bytes is None):
        return None
    is_full = event.get("kind") == "card_full"
    if last.alone:
        return None if is_full else LeaseRequest(alone=True)
    if is_full:
        # Other programs used the memory of the lease. The next try waits for that much free memory, because
        # it would fail again at once otherwise.
        share = share_of(event, lease)
        needed = min(needed_bytes(least_bytes(event, share)), share.memory_bytes)
        return LeaseRequest(memory_bytes=needed, alone=True)
    if lease.alone or len(lease.shares) > 1:
        return None  # the call already had the whole GPU, or several GPUs
    if event.get("kind") == "over_cap" and len(requests) <= _GROWTHS:
        had = lease.shares[0].memory_bytes
        asked = event.get("asked_bytes") or 0
        return LeaseRequest(memory_bytes=int(max(_MORE * had, had + 1.5 * asked)))
    return LeaseRequest(alone=True)


def share_of(event: Mapping[str, Any], lease: Lease) -> Share:
    """Return the share that an ``out_of_memory`` event is about."""
    return next((share for share in lease.shares if share.uuid == event.get("uuid")), lease.shares[0])


def what_happened(label: str, event: Mapping[str, Any], lease: Lease) -> str:
    """Return a short text which says that a call ran out of memory."""
    share = share_of(event, lease)
    size = format_bytes(share.memory_bytes)
    return f"{label} ran out of memory on GPU {share.index} with {size}"


def describe(event: Mapping[str, Any], lease: Lease) -> str:
    """Return a description of the event with its numbers."""
    share = share_of(event, lease)

    def size(name: str) -> str:
        number = event.get(f"{name}_bytes")
        return "unknown" if number is None else format_bytes(number)

    rank = "" if event.get("rank") is None else f"rank {event['rank']}: "
    kind = _KINDS.get(str(event.get("kind")), "unclear")
    return (
        f"{rank}out of memory on GPU {share.index} ({share.name}): {kind}. "
        f"Asked {size('asked')}, reserved {size('reserved')}, cap {size('cap')} of a lease of "
        f"{format_bytes(share.memory_bytes)}, free {size('free')} of {size('total')}"
    )
