"""What a ticket can say. Whatever other accounts can write into theirs is checked here.

Each function returns the value that it checks, and raises ValueError or TypeError.
"""

from __future__ import annotations

import re
from typing import TypeVar

from flower_gpu.leases import admission
from flower_gpu.leases.admission import CORES, MEMORY, CardRequest, Need, Part

T = TypeVar("T")

#: Bytes, or thousandths of a core: more than any host will have for long.
MOST_AMOUNT = 1 << 50
MOST_PID = 1 << 31
MOST_NAMESPACE = 1 << 64
#: Seconds since the epoch.
LATEST_S = 1e11

_GPU = re.compile(r"[a-z0-9./-]{1,100}", re.ASCII | re.IGNORECASE)
_GROUP = re.compile(r"\d{1,30}", re.ASCII)


def exactly(kind: type[T], value: object) -> T:
    """Check a type; True is no number."""
    if type(value) is not kind:
        raise TypeError(kind)
    return value


def whole(value: object, most: int = MOST_AMOUNT) -> int:
    """Return a whole number from 0 on. A negative one would make room for leases that do not fit."""
    number = exactly(int, value)
    if not 0 <= number <= most:
        raise ValueError(number)
    return number


def number(value: object, most: float) -> float:
    """Check a number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(value)
    return float(value)


def gpu(uuid: object) -> str:
    """Check the name of a GPU."""
    name = exactly(str, uuid)
    if not _GPU.fullmatch(name) or admission.kind_of(name) is not None:
        raise ValueError("GPU")
    return name


def of_host(resource: object, user: int) -> str:
    """Check a name of cores or main memory in a ticket of an account."""
    name = exactly(str, resource)
    kind, _, group = name.partition(":")
    of_account = kind == admission.UNKNOWN_MEMORY
    if not (of_account or kind in (CORES, MEMORY)) or not _GROUP.fullmatch(group or "0"):
        raise ValueError("resource")
    if of_account and not (group and admission.is_of_account(int(group), user)):
        raise ValueError("task of another account")
    return name


def option(uuid: str, memory_bytes: int | None, share: float | None, alone: bool) -> CardRequest:
    """Check what a ticket asks for on one GPU."""
    part = None if share is None else number(share, 1.0)
    if part == 0:
        raise ValueError("share")
    return CardRequest(
        gpu(uuid), None if memory_bytes is None else whole(memory_bytes), part, exactly(bool, alone)
    )


def part(user: int, uuid: str, memory_bytes: int, budget_bytes: int, alone: bool) -> Part:
    """Check what a ticket of an account holds of one thing."""
    name = gpu(uuid) if admission.kind_of(exactly(str, uuid)) is None else of_host(uuid, user)
    part = Part(name, whole(memory_bytes), whole(budget_bytes), exactly(bool, alone))
    if not (part.is_gpu or part.budget_bytes):  # it is what there is of it in all, see host.cards
        raise ValueError("budget")
    return part


def need(user: int, resource: str, amount: int, least: int, capacity: int) -> Need:
    """Check what a ticket of an account asks for beside GPUs."""
    most = whole(amount)
    return Need(of_host(resource, user), most, min(whole(least), most), whole(capacity))
