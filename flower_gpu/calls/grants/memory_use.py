"""The GPU memory that this worker uses: a thread watches it during the task, and events report it.

While the task runs, one daemon thread (:class:`_UsageWriter`) measures the memory that this process uses and
writes it into the ticket, so that other processes see it. Only this thread calls NVML. A fork of a process
that is inside NVML may wait forever, and a driver may hang. So the result waits for the thread's last look
only a limited time, and often not at all. If the worker goes to its next call meanwhile, the thread must no
longer write into the ticket, because the lease may belong to another call. ``_is_over`` tells it so.

After the task, its figures go to the caller as events, and so does the reason if memory ran out or CUDA could
not start. With ranks, each of them reports its own GPU, and the caller writes the ticket.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

from flower_gpu import frameworks
from flower_gpu.calls.gpu_use import THIS_WORKER, Use
from flower_gpu.calls.grants import driver_cap
from flower_gpu.frameworks.framework import Figures, Hold
from flower_gpu.leases.lease import Lease
from flower_gpu.workers import events, own_process
from flower_gpu.workers.main_memory import MainMemory
from flower_gpu.workers.own_process import facts

# The first look comes early, to see memory that a task allocates at its start.
_FIRST_LOOK_S = 0.05
_INTERVAL_S = 0.5
# Maximum wait for the last look, so that a driver that hangs does not delay the result
_LAST_LOOK_S = 5.0
# A GPU with less free memory is full, because cuBLAS and cuDNN alone need this amount.
_NEXT_TO_NONE_BYTES = 256 << 20
# Number of queries after which a driver without an answer is not queried again
_LOOKS_FOR_CONTEXT = 20

_log = logging.getLogger(events.LOGGER)


@contextmanager
def measured(lease: Lease, holds: Sequence[Hold]) -> Iterator[None]:
    """Measure and report the memory that the task in the block uses on the GPUs of the lease.

    ``holds``: caps on frameworks, which report what is in force.
    """
    watch = _UsageWriter(lease)
    watch.start()
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        # An error here must not replace the task's own result or error.
        try:
            watch.stop()
            _tell(holds, watch, error)
        except Exception:
            _log.warning("the GPU memory that this call has used is not known", exc_info=True)
        facts.when_idle = watch.rest


@dataclass
class _UsageWriter:
    """Measures the memory of this process twice a second, in its own thread, and writes it into the ticket.

    All NVML queries are made in this thread. They may hang, even in the fork of a process that was querying.
    """

    lease: Lease
    uses: list[Use] = field(init=False)
    free_bytes: dict[str, int] = field(default_factory=dict)
    total_bytes: dict[str, int] = field(default_factory=dict)
    # Figures before the task, or None if CUDA had not started
    figures_before: tuple[Figures, ...] | None = None
    base_bytes: int = 0  # main memory of this process before the task
    _is_known: bool = False  # True if an earlier call has measured the context
    _is_over: bool = False  # True if the task ended without waiting for the last look
    _of_driver: dict[str, int] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)  # bytes of the last report, by UUID
    _looks_for_context: int = _LOOKS_FOR_CONTEXT
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        shares = self.lease.shares
        self.uses = [
            replace(THIS_WORKER.uses.get(share.uuid, Use(share)), share=share, peak_bytes=None)
            for share in shares
        ]
        self._is_known = all(use.context_bytes is not None for use in self.uses)

    def start(self) -> None:
        self.base_bytes = MainMemory.of_process("self").anonymous_bytes
        self.figures_before = _figures()
        if self.figures_before and not own_process.is_inside():
            # If the call runs in the user's own process, only the user may reset the peaks. An error is
            # harmless, because the peaks are only less exact then.
            with suppress(Exception):
                frameworks.reset_peaks()
        thread = threading.Thread(target=self._run, name="flower-gpu-memory", daemon=True)
        # The task can run without this thread if the process is out of threads.
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Measure a last time, then end the thread.

        If the context is known and the allocator reports the rest, a reusable worker sends its result without
        waiting for the last look. The next call then reports what the last look has found.
        """
        # After an error, the last look is waited for.
        with suppress(Exception):
            if self._is_known and frameworks.reserved_bytes() is not None and facts.may_stay:
                self._look(last=False)
                self._is_over = True
        self._end.set()
        if self._thread is not None and not self._is_over:
            self._thread.join(_LAST_LOOK_S)

    def rest(self) -> None:
        """Free the allocator's cache, and report the memory that this idle process keeps."""
        from flower_gpu.leases import tickets

        frameworks.free_cached()
        for use, reserved in zip(self.uses, frameworks.reserved_bytes() or (), strict=False):
            if use.share.uuid in self._used:
                self._used[use.share.uuid] = use.beyond(reserved)
        if self.lease.ticket and not facts.is_confined:
            tickets.report(self._used, self._taken_bytes(), is_idle=True)

    def _taken_bytes(self) -> int:
        """Return the main memory that this process has taken since the task began."""
        return max(0, MainMemory.of_process("self").anonymous_bytes - self.base_bytes)

    def _run(self) -> None:
        pause_s = _FIRST_LOOK_S
        while not self._end.wait(pause_s):
            # An error in this thread must not affect the task.
            with suppress(Exception):
                self._look(last=False)
            pause_s = min(2 * pause_s, _INTERVAL_S)
        with suppress(Exception):
            self._look(last=True)

    def _look(self, *, last: bool) -> None:
        from flower_gpu.leases import tickets

        reserved = frameworks.reserved_bytes()
        # PyTorch's allocator reports its memory at no cost. NVML is queried only until the context is known.
        unknown = any(use.context_bytes is None for use in self.uses) and self._looks_for_context > 0
        if reserved is None or unknown or last:
            self._ask_driver(reserved)
        if last:
            THIS_WORKER.uses.update(
                {use.share.uuid: use for use in self.uses if use.context_bytes is not None}
            )
        if self._is_over or THIS_WORKER.has_ranks:
            # The lease may already belong to another call, or the caller reports the use of all ranks.
            return
        used = {}
        for number, use in enumerate(self.uses):
            if reserved is not None and number < len(reserved) and reserved[number]:
                used[use.share.uuid] = use.beyond(reserved[number])
                use.see(used[use.share.uuid])
            elif use.share.uuid in self._of_driver:
                used[use.share.uuid] = self._of_driver[use.share.uuid]
        if not used:
            return
        self._used = used
        if self.lease.ticket and not facts.is_confined:
            tickets.report(used, self._taken_bytes())
        else:
            # The caller writes the ticket for a rank and for a confined worker.
            events.send("gpu_used", used=used)

    def _ask_driver(self, reserved: list[int] | None) -> None:
        """Record the driver's figures of this process. With PyTorch, also record the size of the context."""
        from flower_gpu.gpu import inventory

        self._of_driver = {}
        gpus = {gpu.uuid: gpu for gpu in inventory.take_of([use.share.uuid for use in self.uses])}
        group_bytes = driver_cap.used_bytes(list(gpus)) if self.lease.by_driver else {}
        for number, use in enumerate(self.uses):
            gpu = gpus.get(use.share.uuid)
            if gpu is None:
                continue
            if gpu.free_bytes is not None:
                self.free_bytes[gpu.uuid] = gpu.free_bytes
            if gpu.total_bytes is not None:
                self.total_bytes[gpu.uuid] = gpu.total_bytes
            used_by_pid = use.ask(gpu, group_bytes.get(gpu.uuid))
            if not used_by_pid:
                continue
            self._of_driver[gpu.uuid] = sum(used_by_pid.values())
            torch_bytes = reserved[number] if reserved is not None and number < len(reserved) else 0
            # If PyTorch has allocated memory since its figures were read, they do not match the driver's.
            # Then a later look finds the context.
            if torch_bytes and frameworks.reserved_bytes() == reserved:
                use.split(used_by_pid, torch_bytes)
        if reserved is not None:
            self._looks_for_context -= 1


def _figures() -> tuple[Figures, ...] | None:
    """Return the figures of frameworks, None without CUDA, or an empty tuple after an error."""
    try:
        return frameworks.figures()
    except Exception:
        _log.warning("a framework does not report its GPU memory", exc_info=True)
        return ()


def _tell(holds: Sequence[Hold], watch: _UsageWriter, error: BaseException | None) -> None:
    """Send the figures to the caller, and the reason if memory ran out or CUDA could not start."""
    figures = _figures()
    in_force: list[int | None] = []
    with suppress(Exception):
        in_force = next((limits for hold in holds if (limits := hold.in_force_bytes())), [])
    columns = (chain(values or (), repeat(None)) for values in (figures, watch.figures_before, in_force))
    gpus = [use.as_event(*values_of_use) for use, *values_of_use in zip(watch.uses, *columns, strict=False)]
    events.send("gpu_memory", gpus=gpus)
    if error is not None and not THIS_WORKER.has_ranks:
        # Ranks report their errors themselves.
        _tell_out_of_memory(watch, figures, error)
    if (text := frameworks.lacks()) is not None:
        events.send("lacks", text=text)
    if THIS_WORKER.has_ranks:
        return
    # If any library has used the GPU, a framework that cannot start CUDA does not matter.
    if figures is None and not any(use.peak_bytes for use in watch.uses) and (reason := frameworks.no_cuda()):
        events.send("no_cuda", **reason)


def _was_short(watch: _UsageWriter, figures: Sequence[Figures] | None) -> bool:
    """Return True if an allocator was refused memory during the call, or a GPU is almost full."""
    counts_before = [gpu.num_ooms for gpu in watch.figures_before or ()]
    refused = [
        gpu.num_ooms - count
        for gpu, count in zip(figures or (), chain(counts_before, repeat(0)), strict=False)
    ]
    free = [gpu.free_bytes for gpu in figures or ()] or list(watch.free_bytes.values())
    return any(refused) or any(number is not None and number < _NEXT_TO_NONE_BYTES for number in free)


def _tell_out_of_memory(watch: _UsageWriter, figures: Any, error: BaseException) -> None:
    from flower_gpu.frameworks import out_of_memory

    cause = out_of_memory.out_of_memory_in(error, lambda: _was_short(watch, figures))
    if cause is None:
        return
    number = out_of_memory.device_index(cause) or 0
    use = watch.uses[number if number < len(watch.uses) else 0]
    share = use.share
    asked = out_of_memory.requested_bytes(cause)
    allocated = allocated_peak = None
    if figures is not None and number < len(figures):
        gpu_figures = figures[number]
        reserved, limit = gpu_figures.reserved_bytes, share.cap_bytes
        allocated, allocated_peak = gpu_figures.allocated_bytes, gpu_figures.peak_allocated_bytes
        free, total = gpu_figures.free_bytes, gpu_figures.total_bytes
    else:
        # For other frameworks, only the driver's figures are known, which include the context.
        reserved, limit = use.peak_bytes, share.memory_bytes
        free, total = watch.free_bytes.get(share.uuid), watch.total_bytes.get(share.uuid)
    kind = out_of_memory.classify(reserved, asked, limit, free)
    if watch.lease.by_driver and asked is not None:
        # With a cap by the driver, CUDA shows free memory of the lease, not of the GPU.
        used = driver_cap.used_bytes([share.uuid]).get(share.uuid, 0)
        if (reserved or 0) + asked > limit or used + asked > share.memory_bytes:
            kind = "over_cap"
    events.send(
        "out_of_memory",
        kind=kind,
        asked_bytes=asked,
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        allocated_peak_bytes=allocated_peak,
        cap_bytes=limit,
        free_bytes=free,
        total_bytes=total,
        outside_bytes=None if figures is None else use.outside_bytes,
        uuid=share.uuid,
    )
