"""The confinement of a worker. :mod:`flower_gpu.workers.confinement` has the rights, and enforces them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.errors import ConfigError
from flower_gpu.leases.lease import Lease
from flower_gpu.options import CONFINED_VARIABLE
from flower_gpu.workers import confinement, own_process

if TYPE_CHECKING:
    from flower_gpu.calls.settings import CallSettings


class ConfinementGrant(Grant):
    """The rights of a worker on this host."""

    def refuse(self, settings: CallSettings) -> None:
        """Refuse several GPUs, and start methods that share memory with the caller."""
        if settings.worker.confinement is None:
            return
        if settings.gpu.request.count > 1:
            raise ConfigError(
                "--confine allows one GPU for a call: ranks on several GPUs connect by TCP, which is "
                "refused. Ask for one (num-gpus=1), or run this app without --confine"
            )
        method = settings.worker.start_method
        if method not in ("auto", "forkserver", "spawn"):
            raise ConfigError(
                f"start_method={method!r} cannot be used with --confine: the worker would have the memory "
                "and the open files of its caller. Remove it, or use 'forkserver' or 'spawn'"
            )

    def environment(self, terms: Terms) -> dict[str, str]:
        """Pass the rights to the worker."""
        if terms.settings.worker.confinement is not None:
            return terms.settings.worker.confinement.environment()
        # A worker that a confined worker starts is confined with it. Both run the same app, so the second
        # worker needs no confinement of its own.
        return {CONFINED_VARIABLE: ""} if CONFINED_VARIABLE in os.environ else {}

    def in_worker(self, lease: Lease | None) -> None:
        """Give up all other rights, for ever."""
        if not own_process.is_inside():
            confinement.apply(os.environ)
