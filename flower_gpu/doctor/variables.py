"""Environment variables of ours: unknown ones, and values that cannot be used."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from flower_gpu.calls.settings import GPUSettings
from flower_gpu.doctor.findings import Found
from flower_gpu.leases.lease import VARIABLE as LEASE
from flower_gpu.options import INTERNAL_VARIABLES, VARIABLES, value_of

# What ours begin with, and what somebody may have written for it.
_ALMOST = ("FLOWER_GPU", "FLOWERGPU", "FLWR_GPU", "FLOWER_GPUS")
_LIKE = 0.75


def variables() -> Iterator[Found]:
    """Check the variables that are set."""
    ours = {name: value for name, value in os.environ.items() if name.upper().startswith(_ALMOST)}
    fine = []
    for name in sorted(ours):
        if name not in VARIABLES and name not in INTERNAL_VARIABLES:
            yield _unknown(name)
        elif name == LEASE and ours[name]:
            todo = f"unset {LEASE}, unless this is a worker"
            yield "problem", f"{LEASE} is set: calls from here are taken for part of a worker's", todo
        elif (reason := _refused(partial(_read, name, ours[name]))) is not None:
            yield "problem", reason, f"correct or unset {name}"
        else:
            fine.append(name)
    together = {name: value for name, value in ours.items() if name in fine}
    if (reason := _refused(lambda: GPUSettings.resolve(environ=together))) is not None:
        yield "problem", reason, "unset one of them"
    elif fine:
        yield "ok", ", ".join(f"{name}={ours[name]}" for name in fine)
    elif not ours:
        yield "ok", "none is set: all settings are the defaults, or the code's"


def _unknown(name: str) -> Found:
    near = difflib.get_close_matches(name.upper(), VARIABLES, 1, _LIKE)
    todo = f"{near[0]} is meant?" if near else "see docs/reference/environment.md for those that there are"
    return "problem", f"{name} is set, and nothing reads it", todo


def _read(name: str, value: str) -> None:
    alone: Mapping[str, str] = {name: value}
    if name in VARIABLES:
        value_of(name, alone)
    GPUSettings.resolve(environ=alone)


def _refused(read: Callable[[], object]) -> str | None:
    try:
        read()
    except (ValueError, TypeError) as error:  # a ConfigError is a ValueError
        return str(error)
    return None
