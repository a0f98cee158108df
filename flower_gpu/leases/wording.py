"""The state of the ledger in words: why a claim waits, its holders, why a claim can never be granted."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Sequence
from typing import Final

from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases import admission
from flower_gpu.leases.admission import CORES, MEMORY, GPUNeed, kind_of
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.leases.state import State, other_program
from flower_gpu.printable import account_name, format_bytes

_MAX_HOLDERS: Final = 3


def amount_text(uuid: str, amount: int) -> str:
    """Return an amount of cores or main memory in words, such as ``2 cores``."""
    if kind_of(uuid) == CORES:
        return f"{amount / 1000:g} core{'' if amount == 1000 else 's'}"
    what = "main memory" if kind_of(uuid) == MEMORY else "memory of calls not measured yet"
    return f"{format_bytes(amount)} of {what}"


def describe(entry: Entry) -> str:
    """Return the owner of a ticket, with its process and the time since the claim or grant."""
    user = "" if entry.user == os.getuid() else f" of user {entry.user}"
    seconds = max(0.0, time.time() - entry.since)
    return f"{entry.label() or 'process'} (pid {entry.pid}{user}) for {seconds:.0f} s"


def what_is_held(state: State, waiting: Entry, label: str) -> str:
    """Return why a claim was not granted: the free memory or cores, and the holders of the rest."""
    lines = []
    for card in state.host if not waiting.count else ():
        lines.append(f"{amount_text(card.uuid, card.capacity_bytes)} can be leased in all")
        for entry in state.holders:
            for part in entry.parts:
                if part.uuid == card.uuid and part.memory_bytes:
                    amount = amount_text(part.uuid, part.memory_bytes)
                    lines.append(f"  {amount} held by {describe(entry)}")
    for gpu, card in zip(state.gpus, state.cards, strict=True) if waiting.count else ():
        free = card.capacity_bytes - state.leased_bytes(gpu.uuid)
        lines.append(f"GPU {gpu.index} ({gpu.name}): {format_bytes(max(0, free))} can be leased")
        for entry in state.holders:
            for part in entry.parts:
                if part.uuid == gpu.uuid:
                    lines.append(f"  {format_bytes(part.memory_bytes)} held by {describe(entry)}")
        if not card.capacity_bytes and (other := other_program(gpu)):
            lines.append(
                f"  its compute mode is {gpu.compute_mode}, and process {other.pid} {other.name} uses it: "
                f"end that process, or as root run nvidia-smi -i {gpu.index} -c DEFAULT"
            )
    # Memory reserved for the first claim is denied to all others, even if that claim never uses it.
    for first in state.waiting[:1]:
        if first.id != waiting.id:
            lines.append(f"first in line: {describe(first)}")
    text = "\n".join(lines)
    resource = "GPU" if waiting.count else "cores or memory"
    return f"{label} got no {resource} in time; {len(state.waiting)} were waiting.\n{text}"


def why_never(
    claimant: str, count: int, needs: Sequence[GPUNeed], gpus: Sequence[GPU], sizes: dict[str, int]
) -> str:
    """Return why a claim can never be granted on these GPUs.

    ``sizes``: bytes for leases on each GPU, by UUID.
    """
    if not gpus:
        return f"{claimant}: this host has no usable GPU (see flower-gpu gpus)"
    room = ", ".join(
        f"GPU {gpu.index} ({gpu.name}) has {format_bytes(max(0, sizes[gpu.uuid]))} for leases" for gpu in gpus
    )
    if count > 1 and len(needs) < count:
        return f"{claimant} asks for {count} GPUs and may use {len(needs)}: {room}"
    requested = max((need.memory_bytes or 0 for need in needs), default=0)
    if requested:
        return f"{claimant} asks for {format_bytes(requested)} of one GPU, more than any GPU has: {room}"
    smallest = format_bytes(admission.LEAST_SHARE_BYTES)
    return f"{claimant} asks for a share of less than {smallest}, too little for CUDA itself: {room}"


def reason_for_wait(state: State, pids: Container[int]) -> str:
    """Return what the first waiting claim of these processes lacks, and who holds it.

    One line, such as ``waiting for cores: 2 of 2 are leased to messages of app (pid 12) of account eve since
    12:00:01``. The text is empty if no claim of these processes waits.
    """
    for entry in state.waiting:
        if entry.pid in pids and entry.pid_namespace == pid_namespace():
            lacking = [
                text
                for uuid, name in _scarce_cards(state, entry).items()
                if (text := _holders_text(state, uuid, name))
            ]
            return f"waiting for {'; '.join(lacking)}" if lacking else ""
    return ""


def _scarce_cards(state: State, entry: Entry) -> dict[str, str]:
    """Return the cards that a claim may wait for: their names for people, by UUID."""
    gpu_names = {gpu.uuid: f"GPU {gpu.index}" for gpu in state.gpus}
    names = {need.uuid: gpu_names.get(need.uuid, "a GPU") for need in entry.gpu_needs}
    free = {card.uuid: card.capacity_bytes - state.leased_bytes(card.uuid) for card in state.host}
    for need in entry.host_needs:
        if need.least > free.get(need.resource, need.least):
            names[need.resource] = "cores" if kind_of(need.resource) == CORES else "memory"
    return names


def _holders_text(state: State, uuid: str, name: str) -> str:
    """Return how much of a card is leased, and to whom, or an empty text if no lease is on it."""
    entries_by_process: dict[tuple[int, int], list[Entry]] = {}
    for entry in state.holders:
        if any(part.uuid == uuid and part.memory_bytes for part in entry.parts):
            entries_by_process.setdefault((entry.user, entry.pid), []).append(entry)
    capacity = {card.uuid: card.capacity_bytes for card in (*state.cards, *state.host)}.get(uuid, 0)
    amounts = (state.leased_bytes(uuid), capacity)
    leased, total = (
        f"{amount / 1000:g}" if kind_of(uuid) == CORES else format_bytes(amount) for amount in amounts
    )
    owners = [_owner(entries) for entries in entries_by_process.values()]
    more = f" and {len(owners) - _MAX_HOLDERS} others" if len(owners) > _MAX_HOLDERS else ""
    return (
        f"{name}: {leased} of {total} are leased to {', '.join(owners[:_MAX_HOLDERS])}{more}"
        if owners
        else ""
    )


def _owner(entries: list[Entry]) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(min(entry.since for entry in entries)))
    label, account = entries[0].label() or "a process", account_name(entries[0].user)
    return f"{label} (pid {entries[0].pid}) of account {account} since {since}"
