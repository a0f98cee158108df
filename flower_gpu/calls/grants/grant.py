"""The interface of a grant. By default, its methods have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flower_gpu.leases.lease import Lease

if TYPE_CHECKING:
    from flower_gpu.calls.settings import CallSettings
    from flower_gpu.workers.methods import StartMethod


@dataclass(frozen=True)
class Terms:
    """A call before the start of its worker, as grants see it in the caller's process."""

    settings: CallSettings
    method: StartMethod
    environ: Mapping[str, str]  # variables of this process and of the call
    lease: Lease | None  # lease of the worker; without shares if it has cores and main memory only
    is_shared: bool  # True if this process is a worker itself, and the new worker shares its lease
    takes_over: bool  # True if the worker takes over settings of this process

    @property
    def gpu_lease(self) -> Lease | None:
        """The lease if it includes GPUs, otherwise None. With None, the worker sees no GPU."""
        return self.lease if self.lease is not None and self.lease.shares else None

    @property
    def own_gpu_lease(self) -> Lease | None:
        """The lease if it has GPUs, and was acquired for this call."""
        return None if self.is_shared else self.gpu_lease


class Grant:
    """Something that a worker gets, or a limit that holds for it.

    :meth:`in_worker` runs in the worker, :meth:`of_lease` in both processes, and all other methods in the
    caller's process. A call with the start method ``in-process`` runs in its caller's process, without a
    worker. There, a grant must not set a limit that the process cannot remove.
    """

    def refuse(self, settings: CallSettings) -> None:
        """Raise ConfigError if calls with these settings cannot have this grant."""

    def adjust(self, lease: Lease, terms: Terms) -> Lease:
        """Return the lease that the worker gets, given the lease on GPUs that was acquired for this call.

        Raises GPUUnavailableError if the worker cannot have it.
        """
        return lease

    def of_lease(self, lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that follow from a lease on GPUs. They stay fixed in the worker.

        ``lease``: None for a worker without a GPU.
        ``environ``: present variables, with the user's settings.
        """
        return {}

    def environment(self, terms: Terms) -> dict[str, str]:
        """Return the variables of a worker."""
        return self.of_lease(terms.gpu_lease, terms.environ)

    def describe(self, terms: Terms, env: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields that the trace records for the call. Also logs notices for the user.

        ``env``: variables of the worker, from all grants.
        """
        return {}

    def on_event(self, event: Mapping[str, Any], lease: Lease | None, record: dict[str, Any]) -> bool:
        """Handle an event that :meth:`in_worker` has sent. Return False for all other events.

        ``record``: fields of the call in the trace.
        """
        return False

    def fault(self, error: BaseException, lease: Lease, environ: Mapping[str, str]) -> str:
        """Return why this error has ended all calls of the run on its GPU, or an empty text."""
        return ""

    def in_worker(self, lease: Lease | None) -> AbstractContextManager[None] | None:
        """Put the grant into force in this worker. Return a context for the task, or None.

        ``lease``: the lease of the worker on GPUs, or None.
        """
        return None
