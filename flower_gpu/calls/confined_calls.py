"""Calls whose workers are confined: what they cannot have, and what is believed of what they tell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flower_gpu.errors import ConfigError
from flower_gpu.options import CONFINED_VARIABLE
from flower_gpu.workers import methods

if TYPE_CHECKING:
    from flower_gpu.calls.settings import CallSettings
    from flower_gpu.leases.lease import Lease
    from flower_gpu.workers.confinement import Confinement


def check(settings: CallSettings) -> None:
    """Refuse what a confined worker cannot have.

    Raises ConfigError if so.
    """
    if settings.worker.confinement is None:
        return
    if settings.gpu.request.count > 1:
        raise ConfigError(
            "--confine: a call gets one GPU at most, since the ranks of several talk to each other by TCP. "
            "Ask for one (num-gpus=1), or run apps that need several without --confine"
        )
    method = settings.worker.start_method
    if method not in ("auto", methods.FORKSERVER.name, methods.SPAWN.name):
        raise ConfigError(
            f"--confine: start_method={method!r} gives workers what their caller has. Leave it out, or use "
            "'forkserver' or 'spawn'"
        )


def environment(confinement: Confinement | None) -> dict[str, str]:
    """Return the variables of a call's worker that say by what it is confined."""
    if confinement is not None:
        return confinement.environment()
    # A worker that a confined one starts is confined with it. Between these two all is one app's.
    return {CONFINED_VARIABLE: ""} if CONFINED_VARIABLE in os.environ else {}


def used_of_lease(used_bytes: Mapping[str, int], held: Lease | None) -> dict[str, int]:
    """Return what a worker says that it uses, as far as that can be: of GPUs of its lease, and not more."""
    shares = held.shares if held is not None else ()
    return {
        share.uuid: min(used_bytes[share.uuid], share.total_bytes)
        for share in shares
        if share.uuid in used_bytes
    }
