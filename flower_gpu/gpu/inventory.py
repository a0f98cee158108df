"""Reads the GPUs of the host: model, memory, processes, and the problem of a GPU that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from flower_gpu import control_group
from flower_gpu.gpu import device_files, nvml
from flower_gpu.gpu.gpus import GPU, GPUProcess, Inventory
from flower_gpu.gpu.nvml_thread import LateError, NVMLThread

T = TypeVar("T")
#: Soft limit, hard limit and use of a control group on a card, in bytes. None for no limit.
Limits = tuple[int | None, int | None, int]

# Without persistence mode, the driver takes some seconds to start for each GPU.
_START_S, _ANSWER_S = 60.0, 15.0
_MIG_CARD = "MIG mode is on: its MIG devices are used instead"
_MIG_CARD_WITHOUT_DEVICES = (
    "MIG mode is on and it has no MIG device: make some (nvidia-smi mig -cgi PROFILE -C), or turn MIG mode "
    "off (nvidia-smi -i INDEX -mig 0)"
)
_PROHIBITED = "its compute mode is PROHIBITED, so no program may use it: as root, nvidia-smi -i {} -c DEFAULT"
_NO_MEMORY_FIGURES = "its driver does not report how much memory it has and uses, so it cannot be shared out"
_NO_GPU = (
    "the NVIDIA driver runs but shows no GPU: see nvidia-smi; in a container, start that with access to the "
    "GPUs (docker run --gpus all)"
)


def take(*, processes: bool = True) -> Inventory:
    """Read the GPUs of the host.

    The first call in a process starts NVML. It is started again in a fork, or after other code has shut it
    down. It is shut down after some seconds without a call, before the process forks, and by :func:`close`.
    Safe to call from several threads.

    ``processes``: also list the processes on each GPU, which takes several times as long.
    Never raises, and never blocks for ever. If figures cannot be read, the result gives the reason in words.
    """
    host = _host()
    try:
        return host.ask(lambda: host.take_here(processes))
    except LateError as late:
        return Inventory((), host.driver_version, _hangs(host.query, late.waited_s), hangs=True)


def take_of(uuids: Sequence[str]) -> tuple[GPU, ...]:
    """Read memory and processes of these GPUs only.

    For workers: the driver does not have to open GPUs outside of their lease.
    """
    with suppress(nvml.QueryError):
        gpus = _query(lambda session: [_read_by_uuid(session, uuid) for uuid in uuids])
        return tuple(gpu for gpu in gpus if gpu is not None)
    return ()


def limits(group: Path, uuids: Iterable[str]) -> dict[str, Limits]:
    """Return the limits and the use of a control group on cards, by UUID.

    Cards without support for such limits are left out.
    Raises QueryError if the driver does not answer.
    """

    def read(session: nvml.NVMLSession) -> dict[str, Limits]:
        limits_by_uuid = {uuid: session.memory_limits(session.with_uuid(uuid), str(group)) for uuid in uuids}
        return {uuid: limits for uuid, limits in limits_by_uuid.items() if limits is not None}

    return _query(read)


def set_limits(group: Path, limits: Mapping[str, int | None]) -> None:
    """Set the limits of a control group on cards, in bytes by UUID. None removes a limit.

    Raises QueryError if the driver does not support limits or denies permission.
    """

    def write(session: nvml.NVMLSession) -> None:
        for uuid, limit_bytes in limits.items():
            session.set_memory_limits(session.with_uuid(uuid), str(group), limit_bytes)

    _query(write)


def _query(work: Callable[[nvml.NVMLSession], T]) -> T:
    host = _host()
    try:
        return host.ask(lambda: host.with_session(work))
    except LateError as late:
        raise nvml.QueryError(_hangs(host.query, late.waited_s)) from None


def take_here() -> Inventory:
    """Read the GPUs in the calling thread and shut NVML down. For processes that must not start threads.

    Blocks while the driver hangs.
    """
    host = _HeldNVML()
    try:
        return host.take_here()
    finally:
        host.forget()


def temperatures() -> dict[str, int]:
    """Return the temperatures of cards in degrees Celsius, by UUID.

    Covers the cards found by the last :func:`take` of this process. Empty after :func:`close`.
    """
    host = _host()
    with suppress(LateError):
        return host.ask(host.temperatures)
    return {}


def close() -> None:
    """Shut NVML down until the next :func:`take`.

    A process with NVML has the GPUs' device files open, so an administrator cannot reset the GPUs or change
    their MIG mode.
    """
    _host().thread.close()


@dataclass(frozen=True)
class _CardFacts:
    """Facts about a card that do not change while NVML is running."""

    handle: nvml.Handle
    uuid: str
    name: str
    mig: bool  # True if the card supports MIG
    persistence_mode: bool | None
    minor: int | None  # number in the name of the device file
    device_files: tuple[str, ...] | None


class _HeldNVML:
    """The NVML session of this process. NVML is started by the first query.

    ``ask`` is called by any thread. All other methods run in the NVML thread, or in the only thread of the
    process.
    """

    def __init__(self) -> None:
        self.thread = NVMLThread(self.forget)
        self._session: nvml.NVMLSession | None = None
        self.driver_version: str | None = None
        self._cuda_version: tuple[int, int] | None = None
        self._cards: dict[int, _CardFacts] = {}
        self._last: dict[int, GPU] = {}  # last result of each card, for the name of a card that fails later
        self.query = ""  # description of the last query, for the message about a driver that hangs

    def ask(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the NVML thread and return its result. Raises LateError."""
        return self.thread.ask(work, _START_S if self._session is None else _ANSWER_S)

    def take_here(self, processes: bool = False) -> Inventory:
        """Read all GPUs of the host."""

        def read(session: nvml.NVMLSession) -> list[GPU]:
            return [
                gpu for index in range(session.count()) for gpu in self._read_card(session, index, processes)
            ]

        try:
            gpus = self.with_session(read)
        except nvml.QueryError as problem:
            return Inventory((), self.driver_version, str(problem))
        reason = None if gpus else _NO_GPU
        return Inventory(tuple(gpus), self.driver_version, reason, cuda_version=self._cuda_version)

    def with_session(self, work: Callable[[nvml.NVMLSession], T]) -> T:
        """Run ``work`` with a session. Retry with a new session if other code has shut NVML down."""
        while True:
            was_open = self._session is not None
            try:
                return work(self._started())
            except nvml.QueryError as problem:
                self.forget()
                if not (was_open and problem.ends_session):
                    raise

    def temperatures(self) -> dict[str, int]:
        """Return the temperatures of known cards, by UUID."""
        degrees: dict[str, int] = {}
        if self._session is None:
            return degrees
        for card in self._cards.values():
            with suppress(nvml.QueryError):
                if (celsius := self._session.temperature_c(card.handle)) is not None:
                    degrees[card.uuid] = celsius
        return degrees

    def forget(self) -> None:
        """Shut NVML down."""
        session, self._session = self._session, None
        self._cards.clear()
        if session is not None:
            session.close()

    def _started(self) -> nvml.NVMLSession:
        self.query = "to start"
        if self._session is None:
            self._session = nvml.NVMLSession()
            self.driver_version = self._session.driver_version()
            self._cuda_version = self._session.cuda_version()
        return self._session

    def _read_card(self, session: nvml.NVMLSession, index: int, processes: bool) -> list[GPU]:
        """Read a card and its MIG devices. On failure, retry once with a new handle."""
        self.query = f"about GPU {index}"
        while True:
            known = self._cards.pop(index, None)
            try:
                card = known or _new_card(session, index)
                gpus = _read_devices(session, index, card, processes)
            except nvml.QueryError as problem:
                if problem.ends_session:
                    raise
                if known is not None:
                    continue
                return [_broken(index, self._last.get(index), str(problem))]
            self._cards[index] = card
            self._last[index] = gpus[0]
            return gpus


def _new_card(session: nvml.NVMLSession, index: int) -> _CardFacts:
    handle = session.card(index)
    mig = True
    try:
        session.mig_devices(handle)
    except nvml.QueryError as problem:
        if not problem.is_absence:
            raise
        mig = False
    minor = session.minor_number(handle)
    files = None if minor is None else device_files.of_card(minor, session.bus_id(handle))
    mode = session.persistence_mode(handle)
    return _CardFacts(handle, session.uuid(handle), session.name(handle), mig, mode, minor, files)


def _read_devices(session: nvml.NVMLSession, index: int, card: _CardFacts, processes: bool) -> list[GPU]:
    # Handles of MIG devices are never kept. NVML may reuse the handle of a removed device for a new one.
    handles = session.mig_devices(card.handle) if card.mig else None
    try:
        gpu = _read(session, index, card.handle, card.uuid, card.name, processes)
    except nvml.QueryError as problem:
        if handles is None or problem.ends_session:
            raise
        # An account with access to MIG devices may lack access to the whole card.
        gpu = replace(_broken(index, None, ""), uuid=card.uuid, name=card.name)
    mode = session.compute_mode(card.handle)
    gpu = replace(
        gpu, persistence_mode=card.persistence_mode, device_files=card.device_files, compute_mode=mode
    )
    prohibited = _PROHIBITED.format(index) if mode == "PROHIBITED" else None
    if handles is None:
        return [replace(gpu, problem=prohibited or gpu.problem)]
    gpus = [replace(gpu, problem=_MIG_CARD if handles else _MIG_CARD_WITHOUT_DEVICES)]
    for handle in handles:
        try:
            if isinstance(handle, nvml.QueryError):
                raise handle
            mig = _read(session, index, handle, session.uuid(handle), session.name(handle), processes)
            mig = replace(mig, device_files=_mig_device_files(session, card, handle), compute_mode=mode)
            mig = replace(mig, problem=prohibited or mig.problem)
        except nvml.QueryError as problem:
            if problem.ends_session:
                raise
            mig = _broken(index, None, str(problem))
        gpus.append(replace(mig, mig_parent=card.uuid))
    return gpus


def _mig_device_files(
    session: nvml.NVMLSession, card: _CardFacts, handle: nvml.Handle
) -> tuple[str, ...] | None:
    instances = session.mig_instances(handle)
    if card.minor is None or instances is None:
        return None
    return device_files.of_mig(card.minor, *instances)


def _read(
    session: nvml.NVMLSession, index: int, handle: nvml.Handle, uuid: str, name: str, processes: bool
) -> GPU:
    gpu = _read_use(session, handle, uuid, processes)
    named = gpu.processes and tuple(
        replace(process, name=session.process_name(process.pid)) for process in gpu.processes
    )
    percent = session.utilization_percent(handle)
    gpu = gpu if uuid.startswith("MIG-") else _limited(session, handle, gpu)
    return replace(gpu, index=index, name=name, utilization_percent=percent, processes=named)


def _limited(session: nvml.NVMLSession, card: nvml.Handle, gpu: GPU) -> GPU:
    """Return a GPU with its memory reduced to the limit of this process's control groups."""
    tightest: tuple[int, int, str] | None = None
    for group in control_group.unified():
        try:
            limits = session.memory_limits(card, str(group))
        except nvml.QueryError as problem:
            if problem.ends_session:
                raise
            continue  # for example the root group, which has no limits
        if limits is None:  # this driver does not support limits
            break
        _, hard, used = limits
        if hard is not None and (tightest is None or hard - used < tightest[0] - tightest[1]):
            tightest = hard, used, str(group)
    if tightest is None or None in (gpu.total_bytes, gpu.free_bytes) or tightest[0] >= (gpu.total_bytes or 0):
        return gpu
    hard, used, name = tightest
    free = max(0, min(hard - used, gpu.free_bytes or 0))
    return replace(
        gpu, total_bytes=hard, used_bytes=hard - free, free_bytes=free, reserved_bytes=0, limited_by=name
    )


def _read_by_uuid(session: nvml.NVMLSession, uuid: str) -> GPU | None:
    try:
        # With a new handle each time, because NVML may reuse the handle of a removed MIG device.
        return _read_use(session, session.with_uuid(uuid), uuid, processes=True)
    except nvml.QueryError as problem:
        if problem.ends_session:
            raise
        return None


def _read_use(session: nvml.NVMLSession, handle: nvml.Handle, uuid: str, processes: bool) -> GPU:
    # Processes before memory: the memory of a process that starts in between then counts as used by an
    # unknown process, and not as free.
    listed = session.processes(handle) if processes else None
    memory = session.memory(handle)
    total, used, free, reserved = memory or (None,) * 4
    return GPU(
        index=-1,
        uuid=uuid,
        name="",
        total_bytes=total,
        used_bytes=used,
        free_bytes=free,
        reserved_bytes=reserved,
        utilization_percent=None,
        processes=None
        if listed is None
        else tuple(GPUProcess(pid, used_bytes, computes=computes) for pid, used_bytes, computes in listed),
        problem=None if memory else _NO_MEMORY_FIGURES,
    )


def _hangs(query: str, waited_s: float) -> str:
    return (
        f"NVIDIA's management library (NVML), asked {query}, has not answered for {waited_s:.0f} s: the "
        "driver hangs, as when a GPU is lost. See the kernel's log (dmesg) for lines with NVRM or Xid; the "
        "machine may have to be restarted"
    )


def _broken(index: int, last: GPU | None, problem: str) -> GPU:
    uuid, name = (last.uuid, last.name) if last else ("", "")
    return GPU(index, uuid, name, None, None, None, None, None, None, problem=problem)


# The session of this process, kept because starting NVML takes tens of milliseconds. The key is the process
# id: a fork inherits the dict, but can use neither the session nor a lock held by another thread.
_hosts: dict[int, _HeldNVML] = {}


def _host() -> _HeldNVML:
    pid = os.getpid()
    host = _hosts.get(pid)
    if host is None:
        host = _hosts.setdefault(pid, _HeldNVML())  # atomic, so that all threads get the same session
        for other in set(_hosts) - {pid}:
            _hosts.pop(other, None)
    return host


def _before_fork() -> None:
    if (host := _hosts.get(os.getpid())) is not None:
        host.thread.before_fork()


def _after_fork_in_parent() -> None:
    if (host := _hosts.get(os.getpid())) is not None:
        host.thread.after_fork_in_parent()


# A fork can use neither the inherited session nor the NVML thread, which does not exist in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
