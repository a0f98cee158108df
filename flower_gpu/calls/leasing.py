"""Leases for calls: the request, the wait, the grant, and the events of all three."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.calls import gpu_use, notices
from flower_gpu.calls.grants import driver_cap
from flower_gpu.calls.settings import GPUSettings, HostSettings
from flower_gpu.errors import (
    ConfigError,
    GPUUnavailableError,
    LeaseError,
    LeaseTimeoutError,
)
from flower_gpu.gpu import drivers, inventory, policy
from flower_gpu.gpu.gpus import GPU, Inventory
from flower_gpu.gpu.policy import Decision
from flower_gpu.leases.admission import CORES, MEMORY, GPUNeed, HostNeed
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import Key, needed_bytes
from flower_gpu.leases.host import CallMemory
from flower_gpu.leases.lease import VARIABLE, Lease, LeaseRequest, Share
from flower_gpu.leases.ledger import SAID_AFTER_S, Claimant, Ledger, reason_for_wait
from flower_gpu.leases.tickets import Ticket
from flower_gpu.printable import format_bytes
from flower_gpu.workers import events, own_process

_log = logging.getLogger(events.LOGGER)

#: A call accepts an existing lease of up to this factor of its need. A larger lease would waste memory of the
#: GPU, so the call gets a new one.
MOST_TOO_MUCH: Final = 1.25


@dataclass(frozen=True)
class Leasing:
    """Acquires the leases of one call, for each of its tries."""

    settings: GPUSettings
    uuids: tuple[str, ...]  # acceptable GPUs; empty if the call runs on the CPU
    label: str  # name of the call, such as "fit of client 3"
    key: Key  # key of its footprint, without the model of a GPU
    record: Mapping[str, Any]  # fields of the call in the trace
    host: HostSettings  # its request for cores and main memory
    # Returns the end of the wait for a lease, on the clock of time.monotonic. By default, the wait ends after
    # lease_timeout_s. The function is called repeatedly, and an error that it raises ends the wait.
    deadline: Callable[[], float] | None = None
    # True after the call ran out of main memory. It then requests all main memory that leases can have.
    asks_for_all_memory: bool = False
    footprints: Footprints = field(default_factory=Footprints)

    @contextmanager
    def hold(self, request: LeaseRequest) -> Iterator[tuple[Lease, Ticket]]:
        """Wait for a lease, and hold it in the block.

        ``request``: request of the settings, or a larger one after the call ran out of memory.

        Raises LeaseError if no GPU can ever grant the request.
        Raises LeaseTimeoutError if the request was not granted in time.
        Raises GPUUnavailableError if the GPU no longer answers when the lease is granted.
        """
        ledger = self.ledger()
        self._trace_request(request)
        began = time.monotonic()
        try:
            ticket = self._acquire(ledger, request, began)
        except BaseException as error:
            self._trace_failure(error, began)
            raise
        granted = time.monotonic()
        lease = None
        try:
            lease = self._lease(ticket)
            gpus = [
                {"uuid": s.uuid, "index": s.index, "name": s.name, "memory_bytes": s.memory_bytes}
                for s in lease.shares
            ]
            trace.write(
                self._event("granted"),
                **self.record,
                lease=lease.id,
                gpus=gpus,
                alone=lease.alone,
                waited_s=round(granted - began, 4),
                cores=ticket.entry.cores,
                host_memory_bytes=ticket.entry.host_memory_bytes,
            )
            if _log.isEnabledFor(logging.DEBUG) and gpus:
                of = ", ".join(f"{format_bytes(s.memory_bytes)} of GPU {s.index}" for s in lease.shares)
                _log.debug("%s has a lease on %s after %.2f s", self.label, of, granted - began)
            yield lease, ticket
        except Exception as error:
            if lease is None:
                self._trace_failure(error, began)
            raise
        finally:
            try:
                # This is written before the release, so that the next holder's line follows in the trace.
                if lease is not None:
                    held_s = round(time.monotonic() - granted, 4)
                    trace.write(self._event("released"), **self.record, lease=lease.id, held_s=held_s)
                # The worker is gone, but its control group would still reserve memory of the next lease. A
                # call on the CPU leaves no group, so it does not depend on a driver that may hang.
                if self.uuids:
                    driver_cap.remove_stale()
            finally:
                ledger.release(ticket)

    def ledger(self) -> Ledger:
        """Return the ledger with this call's reserves."""
        return Ledger(reserve_bytes=self.settings.reserve_bytes, host_reserve_bytes=self.host.reserve_bytes)

    @contextmanager
    def hold_cores(self) -> Iterator[tuple[Lease, Ticket] | None]:
        """Wait for cores and main memory, and hold them in the block. Yield None if there is no lease.

        A ledger that cannot be used is an error only if the call requests a number of cores.
        """
        with ExitStack() as stack:
            lease_and_ticket = None
            if self.host_needs():
                try:
                    lease_and_ticket = stack.enter_context(self.hold(self.settings.request))
                except LeaseTimeoutError:
                    raise
                except LeaseError as error:
                    if self.host.num_cpus is not None:
                        raise
                    notices.say_once(f"calls on the CPU run without leases on cores: {error}")
            yield lease_and_ticket

    def host_needs(self) -> tuple[HostNeed, ...]:
        """Return the cores and the main memory that the call needs now."""
        if not self.host.is_leased:
            return ()
        cores = self.host.cores(on_gpu=bool(self.uuids))
        return (*(() if cores is None else (cores,)), *self._memory.needs())

    @property
    def _memory(self) -> CallMemory:
        on_gpu, reserve_bytes = bool(self.uuids), self.host.reserve_bytes
        return CallMemory(self.footprints, self.key, on_gpu, reserve_bytes, self.asks_for_all_memory)

    def learn_memory(self, taken_bytes: int, *, is_done: bool) -> None:
        """Record a worker's peak of main memory for the next calls.

        ``taken_bytes``: peak of the worker's main memory.
        ``is_done``: False if the call failed. Then the peak is a lower limit of the need.
        """
        if self.host.is_leased:
            with _only_warned():
                self._memory.learn(taken_bytes, is_done=is_done)

    def _event(self, what: str) -> str:
        # A `lease_granted` always has a GPU, so leases of cores have events of their own.
        return f"lease_{what}" if self.uuids else f"cores_{what}"

    def _trace_request(self, request: LeaseRequest) -> None:
        needs = {need.resource: need.amount for need in self.host_needs()}
        trace.write(
            self._event("requested"),
            **self.record,
            caller_pid=os.getpid(),
            count=self._count,
            share=request.share if self.uuids else None,
            memory_bytes=request.memory_bytes,
            alone=request.alone,
            cores=needs[CORES] / 1000 if CORES in needs else None,
            host_memory_bytes=needs.get(MEMORY),
        )

    def learn(self, figures: Mapping[str, Any], lease: Lease, *, is_done: bool) -> None:
        """Record the figures of a worker's ``gpu_memory`` event for the next calls.

        ``is_done``: False if the task failed. It may then need more memory than the figures show.
        """
        shares = {share.uuid: share for share in lease.shares}
        for gpu_figures in figures.get("gpus", ()):
            share = shares.get(gpu_figures.get("uuid"))
            if share is None:
                continue
            with _only_warned():
                if gpu_figures.get("context_bytes"):
                    self.footprints.learn_context(share.name, gpu_figures["context_bytes"])
                # The need of a call on one GPU does not follow from its use of each of several GPUs.
                if len(shares) > 1:
                    continue
                if gpu_figures.get("peak_bytes") is None:
                    if gpu_figures.get("told_by_driver") is False and self._names_no_size():
                        notices.say_once(notices.unmeasured(share, self.key.task))
                    continue
                # The size of a context is the minimum, because a call without any use may use the GPU next
                # time.
                measured = gpu_use.measured(gpu_figures, share, self.footprints.context(share.name))
                self.footprints.learn_call(self.key.on(share.name), measured, is_done=is_done)

    def learn_at_least(self, event: Mapping[str, Any], lease: Lease) -> None:
        """Record the memory that a task would have needed, from its ``out_of_memory`` event ``event``."""
        share = next((share for share in lease.shares if share.uuid == event.get("uuid")), None)
        if share is not None and event.get("kind") == "over_cap":
            with _only_warned():
                needed = min(gpu_use.least_bytes(event, share), share.total_bytes)
                key = self.key.on(share.name)
                self.footprints.learn_need(key, needed, gpu_use.in_allocator(event))

    def _names_no_size(self) -> bool:
        return self.settings.request.share is None and self.settings.request.memory_bytes is None

    def may_have(self, lease: Lease) -> bool:
        """Return True if this call can use the lease of another call with the same settings.

        The lease must have a suitable size. The other call may have been measured, may belong to another
        task, or may have used an older footprint.
        """
        if not self.settings.request.is_auto:
            return True
        for share in lease.shares:
            needed = self._learned_bytes(share.name)
            if needed is None or share.memory_bytes > MOST_TOO_MUCH * needed:
                return False
            # A lease that is alone on its GPU can use all of its memory.
            if share.memory_bytes < needed and not lease.alone:
                return False
        return True

    def _acquire(self, ledger: Ledger, request: LeaseRequest, began: float) -> Ticket:
        # While a call waits for all main memory, no other claim gets any. So this wait always has a limit.
        has_limit = bool(self.uuids) or self.asks_for_all_memory
        timeout_s = self.settings.lease_timeout_s if has_limit else self.host.timeout_s
        claimant = Claimant(
            gpu_needs=lambda gpus: self._gpu_needs(gpus, request),
            version=self.footprints.version,
            count=self._count,
            host_needs=self.host_needs,
            pack=self.settings.placement == "pack",
            label=self.label,
        )
        try:
            deadline = self.deadline or self._deadline_with_notice(began + timeout_s, began)
            return ledger.acquire(claimant, deadline=deadline)
        except LeaseTimeoutError as error:
            raise LeaseTimeoutError(
                f"{self.label}: no lease within lease_timeout_s={timeout_s:g}. "
                f"{error}\nRaise lease_timeout_s, ask for less, or let fewer clients train at a time"
            ) from None

    def _deadline_with_notice(self, timeout_at: float, began: float) -> Callable[[], float]:
        """Return a function for the ledger that returns the end of a wait.

        After a while the function also logs once what the call waits for.
        """
        pending = [began + SAID_AFTER_S]  # time of the notice; empty once it was logged

        def deadline() -> float:
            if pending and time.monotonic() >= pending[0]:
                pending.clear()
                if text := reason_for_wait((os.getpid(),)):
                    notices.say(f"{self.label} is {text}")
            return timeout_at

        return deadline

    def _trace_failure(self, error: BaseException, began: float) -> None:
        waited_s = round(time.monotonic() - began, 4)
        trace.write(self._event("not_granted"), **self.record, waited_s=waited_s, reason=type(error).__name__)

    @property
    def _count(self) -> int:
        return self.settings.request.count if self.uuids else 0

    def _gpu_needs(self, gpus: Sequence[GPU], request: LeaseRequest) -> tuple[GPUNeed, ...]:
        return tuple(self._gpu_need(gpu, request) for gpu in gpus if gpu.uuid in self.uuids)

    def _gpu_need(self, gpu: GPU, request: LeaseRequest) -> GPUNeed:
        if request.share is not None:
            return GPUNeed(gpu.uuid, share=request.share)
        if request.memory_bytes is not None and request == self.settings.request:
            self._check_context(gpu.index, gpu.name, request.memory_bytes)
            return GPUNeed(gpu.uuid, memory_bytes=request.memory_bytes)
        needed = self._learned_bytes(gpu.name) if request.is_auto else request.memory_bytes
        available = (gpu.total_bytes or 0) - (gpu.reserved_bytes or 0) - self.settings.reserve_bytes
        if needed is None or needed >= available:
            return GPUNeed(gpu.uuid, alone=True)
        return GPUNeed(gpu.uuid, memory_bytes=needed, alone=request.alone)

    def _learned_bytes(self, model: str) -> int | None:
        peak = self.footprints.get(self.key.on(model))
        return None if peak is None else needed_bytes(peak)

    def _check_context(self, index: int, name: str, memory_bytes: int) -> None:
        context = self.footprints.context(name)
        if memory_bytes <= context:
            raise ConfigError(
                f"{self.label} asks for {format_bytes(memory_bytes)} of GPU {index} ({name}); CUDA's "
                f"context alone takes {format_bytes(context)} there, so ask for more"
            )

    def _lease(self, ticket: Ticket) -> Lease:
        # A call on the CPU does not query the driver.
        host = inventory.take(processes=False) if self.uuids else Inventory((), None, None)
        shares = []
        for part in ticket.entry.gpu_parts:
            gpu = host.find(part.uuid)
            if gpu is None or not gpu.total_bytes:
                # JAX, and PyTorch before CUDA starts, are limited to a fraction of the GPU's memory. Without
                # the right total this fraction is no limit.
                raise self._no_cap(part.uuid, host, gpu)
            self._check_context(gpu.index, gpu.name, part.memory_bytes)
            cap_bytes = part.memory_bytes - self._outside(gpu.name, part.memory_bytes)
            files = gpu.device_files
            shares.append(
                Share(part.uuid, gpu.index, gpu.name, gpu.total_bytes, part.memory_bytes, cap_bytes, files)
            )
        alone = any(part.alone for part in ticket.entry.parts)
        return Lease(ticket.entry.id, tuple(shares), alone, str(ticket.entry.path))

    def _outside(self, name: str, memory_bytes: int) -> int:
        """Return the bytes of a lease outside of the allocator: for the context and other libraries."""
        context = self.footprints.context(name)
        if not self._names_no_size():
            return context
        outside = self.footprints.outside(self.key.on(name))
        return max(context, outside) if outside < memory_bytes else context

    def _no_cap(self, uuid: str, host: Inventory, gpu: GPU | None) -> GPUUnavailableError:
        reason = host.problem or (gpu.problem if gpu is not None else "it is no longer there")
        name = uuid if gpu is None else f"{gpu.index} ({gpu.name})"
        return GPUUnavailableError(
            f"{self.label} was not started: it has a lease on GPU {name}, but the driver no longer reports "
            f"the memory of that GPU, so no limit can be set: {reason}. Try again when `flower-gpu gpus` "
            "shows it"
        )


def decide(settings: GPUSettings, use_gpu: bool | None, environ: Mapping[str, str]) -> Decision:
    """Return the decision whether a call may use a GPU, and which ones. Warnings are logged.

    Raises GPUUnavailableError if the node requires a GPU that cannot be used.
    """
    host = settings.inventory
    if host is None:
        no_gpus = Inventory((), None, None)
        host = no_gpus if settings.policy.gpu == "never" else inventory.take(processes=False)
    decision, _ = decided(settings, use_gpu, host, environ)
    for text in decision.warnings:
        notices.say_once(text, logging.ERROR if decision.is_serious else logging.WARNING)
    return decision


def decided(
    settings: GPUSettings, use_gpu: bool | None, host: Inventory, environ: Mapping[str, str]
) -> tuple[Decision, list[GPU]]:
    """Return the decision for a host, and the GPUs that a call may use.

    Raises GPUUnavailableError as :func:`decide` does.
    """
    visible = host.visible(environ.get(drivers.of_host().visible_variable))
    hidden = [gpu for gpu in host.gpus if gpu not in visible and gpu.is_usable]
    decision = policy.decide(settings.policy, use_gpu, visible, host.problem, hidden=hidden)
    return decision, [gpu for gpu in visible if gpu.uuid in decision.uuids]


@contextmanager
def _only_warned() -> Iterator[None]:
    """Log an error of learning from a call, so that it does not replace the result of the call."""
    try:
        yield
    except ConfigError as error:
        notices.say_once(f"a measurement could not be stored: {error}")


def is_worker() -> bool:
    """Return True if the caller runs in a worker, or in a call that runs in this process."""
    return own_process.belongs_here(VARIABLE)


def of_this_process() -> Lease | None:
    """Return the lease of this process if it is a worker with a lease, otherwise None."""
    return Lease.from_environment(os.environ)
