"""Grants: resources and limits of a worker. Each grant has its own file.

Other rooms and modules call the functions of this module, which ask each grant in turn::

    caller   refuse ── adjusted ── environment ── describe     fault, on_event <── events ──┐
                                       │                                                  │
    worker                             └──> in_worker: for each grant of ALL ── task ───────┘

To add a grant, subclass :class:`~flower_gpu.calls.grants.grant.Grant` in a new file, and add it to
:data:`ALL`. It may also need an option, and docs. ``tests/calls/test_grants_together.py`` tries all pairs.

The order of :data:`ALL` is the order in which a worker puts its grants into force:

1. The driver's cap comes first, because a guarded or confined worker may not create a control group.
2. The GPU guard comes before the confinement, because it lists the entries of ``/`` and ``/dev``, and a
   confined worker may not.
3. Thread counts, ranks and the visible GPUs may come anywhere before the task.
4. MPS starts CUDA to count processors. From then on the process has device files open and memory on its GPU,
   so 1 and 2 must be in force.
5. The cap of allocators is last, because it also measures the memory that the task takes.

All combinations are allowed, except for ranks of a confined worker, which the confinement refuses. A call
with ``in-process`` has no driver's cap, guard or confinement, because this process could not undo them. Such
a call fails if the operator requires any of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.calls.environment import fixed, kept
from flower_gpu.calls.grants.allocator_cap import AllocatorCap
from flower_gpu.calls.grants.confinement import ConfinementGrant
from flower_gpu.calls.grants.driver_cap import DriverCap
from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.calls.grants.guard import GPUGuard
from flower_gpu.calls.grants.leased_gpus import LeasedGPUs
from flower_gpu.calls.grants.mps import MPSShare
from flower_gpu.calls.grants.ranks import RankGrant
from flower_gpu.calls.grants.thread_counts import ThreadCounts
from flower_gpu.gpu import drivers
from flower_gpu.leases.lease import Lease
from flower_gpu.workers import own_process

if TYPE_CHECKING:
    from flower_gpu.calls.settings import CallSettings

ALL: Final[tuple[Grant, ...]] = (
    DriverCap(),
    GPUGuard(),
    ConfinementGrant(),
    ThreadCounts(),
    RankGrant(),
    MPSShare(),
    LeasedGPUs(),
    AllocatorCap(),
)

#: :func:`in_worker`, as the ``setup`` of a call.
SETUP: Final = "flower_gpu.calls.grants:in_worker"


def refuse(settings: CallSettings) -> None:
    """Raise ConfigError if these settings exclude each other."""
    for grant in ALL:
        grant.refuse(settings)


def adjusted(terms: Terms) -> Terms:
    """Return the terms with the lease as adjusted by all grants."""
    for grant in ALL:
        if (lease := terms.own_gpu_lease) is not None:
            terms = replace(terms, lease=grant.adjust(lease, terms))
    return terms


def of_lease(lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that follow from its lease. Without a lease, it sees no GPU.

    They are set on top of ``environ``. The user's allocator settings in ``environ`` still apply, including a
    smaller cap.

    Raises ConfigError if the user's cap is not a number.
    """
    return {name: value for grant in ALL for name, value in grant.of_lease(lease, environ).items()}


def environment(terms: Terms) -> dict[str, str]:
    """Return the variables of a worker, including the user's variables for the call."""
    granted = {name: value for grant in ALL for name, value in grant.environment(terms).items()}
    return {**terms.settings.worker.env, **granted}


def describe(terms: Terms, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a call in the trace, from its terms and its variables ``env``."""
    return {name: value for grant in ALL for name, value in grant.describe(terms, env).items()}


def on_event(event: Mapping[str, Any], lease: Lease | None, record: dict[str, Any]) -> bool:
    """Handle an event that a grant has sent from the worker. Return False if no grant knows the event."""
    return any(grant.on_event(event, lease, record) for grant in ALL)


def fault(error: BaseException, lease: Lease, environ: Mapping[str, str]) -> str:
    """Return why this error affects all calls of the run on the GPU, or an empty text if it does not."""
    return next(filter(None, (grant.fault(error, lease, environ) for grant in ALL)), "")


@contextmanager
def in_worker() -> Iterator[None]:
    """Put all grants of this worker into force, and keep their variables fixed while the task runs.

    The grants are in the environment. Without a lease on GPUs, the worker sees no GPU. If the caller set no
    variables of grants, the worker only gets its number of threads.

    Raises ConfigError if the user's allocator settings cannot be used with PyTorch as it is loaded.
    """
    lease = Lease.from_environment(os.environ)
    with ExitStack() as stack:
        # A call in the client's own process shares its environment with the client's other threads.
        is_granted = lease is not None or drivers.hides_all(os.environ)
        if is_granted and not own_process.is_inside():
            stack.enter_context(fixed(kept(of_lease(lease, os.environ))))
        for grant in ALL:
            if (context := grant.in_worker(lease)) is not None:
                stack.enter_context(context)
        yield
