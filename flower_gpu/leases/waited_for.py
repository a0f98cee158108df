"""Says what the requests of some processes wait for, and who has it."""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Final

from flower_gpu.errors import GPUError
from flower_gpu.leases.admission import CORES, kind_of
from flower_gpu.leases.ledger import Ledger, State
from flower_gpu.leases.tickets import Entry, pid_namespace
from flower_gpu.printable import account_name, format_bytes

#: After so long without a lease, or a run without a worker, it says what it waits for.
SAID_AFTER_S: Final = 5.0
_MOST_HOLDERS: Final = 3


def waited_for(pids: Container[int]) -> str:
    """Return what the first of these processes that wait lacks, and who has it; empty: none of them waits.

    It is one line, such as ``waiting for cores: 2 of 2 are leased to messages of app (pid 12) of account eve
    since 12:00:01``.
    """
    try:
        state = Ledger().status()
    except (OSError, GPUError):
        return ""
    for entry in state.waiting:
        if entry.pid in pids and entry.pid_namespace == pid_namespace():
            lacking = [
                text for uuid, name in _wanted(state, entry).items() if (text := _text(state, uuid, name))
            ]
            return f"waiting for {'; '.join(lacking)}" if lacking else ""
    return ""


def _wanted(state: State, entry: Entry) -> dict[str, str]:
    """Return what a request may be lacking, by its id in the ledger."""
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in state.gpus}
    found = {option.uuid: names.get(option.uuid, "a GPU") for option in entry.options}
    free = {card.uuid: card.capacity_bytes - state.leased_bytes(card.uuid) for card in state.host}
    for need in entry.needs:
        if need.least > free.get(need.resource, need.least):
            found[need.resource] = "cores" if kind_of(need.resource) == CORES else "memory"
    return found


def _text(state: State, uuid: str, name: str) -> str:
    """Say how much of something is leased, and to whom; empty where nobody has any of it."""
    held: dict[tuple[int, int], list[Entry]] = {}
    for entry in state.holders:
        if any(part.uuid == uuid and part.memory_bytes for part in entry.parts):
            held.setdefault((entry.user, entry.pid), []).append(entry)
    capacity = {card.uuid: card.capacity_bytes for card in (*state.cards, *state.host)}.get(uuid, 0)
    amounts = (state.leased_bytes(uuid), capacity)
    leased, whole = (f"{one / 1000:g}" if kind_of(uuid) == CORES else format_bytes(one) for one in amounts)
    owners = [_owner(entries) for entries in held.values()]
    more = f" and {len(owners) - _MOST_HOLDERS} others" if len(owners) > _MOST_HOLDERS else ""
    return (
        f"{name}: {leased} of {whole} are leased to {', '.join(owners[:_MOST_HOLDERS])}{more}"
        if owners
        else ""
    )


def _owner(entries: list[Entry]) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(min(entry.since for entry in entries)))
    label, account = entries[0].label() or "a process", account_name(entries[0].user)
    return f"{label} (pid {entries[0].pid}) of account {account} since {since}"
