"""``flower-gpu leases``: the leases of this host, and the pending requests."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from flower_gpu.cli.arguments import JSON, Command
from flower_gpu.gpu import inventory
from flower_gpu.leases.admission import CORES, MEMORY, kind_of
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.state import State
from flower_gpu.leases.wording import amount_text
from flower_gpu.options import RESERVE
from flower_gpu.printable import account_name, format_bytes, printable

NAMES = {CORES: "Cores", MEMORY: "Main memory"}

# Time limit for the ledger's mutex. Other processes hold it for milliseconds, and a user waits for the
# output.
_MUTEX_WAIT_S = 5.0


def run(arguments: argparse.Namespace) -> int:
    """Print the leases, and return the exit status."""
    folder = replace(LedgerFolder.find(), mutex_wait_s=_MUTEX_WAIT_S)
    ledger = Ledger(folder, RESERVE.resolve(None, os.environ))
    state = ledger.status()
    if arguments.json:
        print(json.dumps(describe(ledger, state), indent=2))
        return 0
    for line in _lines(state):
        print(line)
    return 0


def describe(ledger: Ledger, state: State) -> dict[str, Any]:
    """Return the output of ``--json``."""
    capacity = {card.uuid: card.capacity_bytes for card in state.cards}
    return {
        "ledger": str(ledger.folder.root),
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "total_bytes": gpu.total_bytes,
                "capacity_bytes": capacity[gpu.uuid],
                "leased_bytes": state.leased_bytes(gpu.uuid),
            }
            for gpu in state.gpus
        ],
        "host": {
            **{
                f"{card.uuid}_{what}": amount / 1000 if kind_of(card.uuid) == CORES else amount
                for card in state.host
                if kind_of(card.uuid) in NAMES
                for what, amount in (
                    ("capacity", card.capacity_bytes),
                    ("leased", state.leased_bytes(card.uuid)),
                )
            },
        },
        "holders": [
            {
                **_owner(entry),
                "parts": [vars(part) for part in entry.gpu_parts],
                "is_idle": entry.is_idle(),
                **_of_host(entry),
            }
            for entry in state.holders
        ],
        "waiting": [
            {
                **_owner(entry),
                "count": entry.count,
                "options": [vars(need) for need in entry.gpu_needs],
                **_of_host(entry),
            }
            for entry in state.waiting
        ],
    }


def _of_host(entry: Entry) -> dict[str, Any]:
    return {"cores": entry.cores, "host_memory_bytes": entry.host_memory_bytes}


def _owner(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "label": entry.label(),
        "pid": entry.pid,
        "worker_pid": entry.reported()[0] or None,
        "user": account_name(entry.user),
        "seconds": round(max(0.0, time.time() - entry.since), 1),
    }


def _lines(state: State) -> list[str]:
    lines = []
    if not state.gpus:
        lines.append(f"no usable GPU: {inventory.take().problem or 'see flower-gpu gpus'}")
    for gpu, card in zip(state.gpus, state.cards, strict=True):
        leased = state.leased_bytes(gpu.uuid)
        percent = 100 * leased / card.capacity_bytes if card.capacity_bytes else 0.0
        lines.append(
            f"GPU {gpu.index}  {gpu.name}  {format_bytes(leased)} of {format_bytes(card.capacity_bytes)} "
            f"leased ({percent:.0f} %)"
        )
        lines += _holders(state, gpu.uuid)
    numbers = {gpu.uuid: gpu.index for gpu in state.gpus}
    for uuid in sorted({part.uuid for entry in state.holders for part in entry.gpu_parts} - set(numbers)):
        lines += [f"{printable(uuid)}, not usable now", *_holders(state, uuid)]
    lines += _host_lines(state)
    if not state.gpus and not state.holders and not state.waiting:
        return lines
    lines.append(f"waiting: {len(state.waiting) or 'nobody'}")
    for place, entry in enumerate(state.waiting, start=1):
        gpus = sorted({numbers[need.uuid] for need in entry.gpu_needs if need.uuid in numbers})
        on = f"{entry.count} of " if entry.count > 1 else ""
        where = ", ".join(map(str, gpus)) or "that is not usable now"
        asked = [f"{_asked(entry)} on {on}GPU {where}"] if entry.count else []
        asked += [
            amount_text(need.resource, need.amount) for need in entry.host_needs if need.resource in NAMES
        ]
        lines.append(f"  {place}. {', '.join(asked)}  {_line(entry)}")
    return lines


def _host_lines(state: State) -> Iterator[str]:
    """Yield lines about cores and main memory, their leases, and the limits of control groups."""
    for card in state.host:
        kind, _, group = card.uuid.partition(":")
        if kind not in NAMES:
            continue
        title = f"{NAMES[kind]}{' of a control group' if group else ''}"
        if kind == CORES:
            leased = f"{state.leased_bytes(card.uuid) / 1000:g} of {card.capacity_bytes / 1000:g}"
        else:
            leased = f"{format_bytes(state.leased_bytes(card.uuid))} of {format_bytes(card.capacity_bytes)}"
        yield f"{title}  {leased} leased"
        for entry in state.holders if kind == CORES and not group else ():
            if entry.cores is not None:
                memory = entry.host_memory_bytes
                and_memory = "" if memory is None else f", {format_bytes(memory)}"
                yield f"  {entry.cores:>9g}{and_memory}  {_line(entry)}"
        for entry in state.holders if kind == MEMORY and not group else ():
            if entry.cores is None and entry.host_memory_bytes is not None:
                yield f"  {format_bytes(entry.host_memory_bytes):>9}  {_line(entry)}"


def _holders(state: State, uuid: str) -> Iterator[str]:
    for entry in state.holders:
        for part in entry.parts:
            if part.uuid == uuid:
                alone = ", alone" if part.alone else ""
                yield f"  {format_bytes(part.memory_bytes):>9}{alone}  {_line(entry)}"


def _asked(entry: Entry) -> str:
    first = entry.gpu_needs[0] if entry.gpu_needs else None
    if first is None:
        return "nothing"
    if first.memory_bytes is not None:
        return format_bytes(first.memory_bytes)
    return "all" if first.alone or first.share is None else f"{first.share:g}"


def _line(entry: Entry) -> str:
    user = "" if entry.user == os.getuid() else f", user {account_name(entry.user)}"
    elsewhere = "" if entry.pid_namespace == pid_namespace() else " in another container"
    idle = ", idle" if entry.is_idle() else ""
    seconds = max(0.0, time.time() - entry.since)
    return f"{printable(entry.label()) or '-'} (pid {entry.pid}{elsewhere}{user}{idle}) {seconds:.0f} s"


COMMAND: Final = Command(
    "show the leases on GPUs, cores and main memory, and the waiting requests",
    """\
Show this host's GPUs, cores and main memory for leases, the leases on them, and the requests that wait, in
the order of the queue. Labels are shown for this account's own calls.""",
    run,
    JSON,
)
