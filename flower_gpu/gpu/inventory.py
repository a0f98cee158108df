"""The host's GPUs: model, memory, and the problem of one that cannot be used."""

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
#: A control group's soft and hard limit on a card, and its use, in bytes; None where there is no limit.
Limits = tuple[int | None, int | None, int]

# Without persistence mode the driver takes some seconds to start, for each GPU.
_START_S, _ANSWER_S = 60.0, 15.0
_MIG_CARD = "MIG mode is on: its MIG devices are used instead"
_MIG_CARD_WITHOUT_DEVICES = (
    "MIG mode is on and it has no MIG device: make some (nvidia-smi mig -cgi PROFILE -C), or turn MIG mode "
    "off (nvidia-smi -i INDEX -mig 0)"
)
_PROHIBITED = "its compute mode is PROHIBITED, so no program may use it: as root, nvidia-smi -i {} -c DEFAULT"
_NO_MEMORY_FIGURES = "its driver does not tell how much memory it has and uses, so it cannot be shared out"
_NO_GPU = (
    "the NVIDIA driver runs and shows no GPU: see nvidia-smi; in a container, start that with access to the "
    "GPUs (docker run --gpus all)"
)


def take(*, processes: bool = True) -> Inventory:
    """Look at the host's GPUs now.

    NVML is started with the first call in a process (and again in a fork, or when somebody has shut it down).
    It is given back when nobody has asked for some seconds, when the process is about to fork, and by
    :func:`close`. Safe to call from several threads.

    ``processes``: whether to ask who uses each GPU, which takes several times as long.
    Never raises, and never waits for ever: what cannot be had is missing, with the reason in words.
    """
    host = _host()
    try:
        return host.ask(lambda: host.take_here(processes))
    except LateError as late:
        return Inventory((), host.driver_version, _hangs(host.asked, late.waited_s), hangs=True)


def take_of(uuids: Sequence[str]) -> tuple[GPU, ...]:
    """Look at these GPUs only: their memory, and who uses it. What else they are is left out.

    For a worker, which has a lease of some: others are not opened, and nothing is asked about them.
    """
    with suppress(nvml.QueryError):
        found = _told(lambda session: [_read_by_uuid(session, uuid) for uuid in uuids])
        return tuple(gpu for gpu in found if gpu is not None)
    return ()


def limits(group: Path, uuids: Iterable[str]) -> dict[str, Limits]:
    """Return a control group's limits on cards, by UUID: the soft and the hard one, and its use, in bytes.

    A limit is None where there is none. Cards whose driver knows no such limits are left out.
    Raises QueryError if the driver does not answer.
    """

    def look(session: nvml.NVMLSession) -> dict[str, Limits]:
        told = {uuid: session.memory_limits(session.with_uuid(uuid), str(group)) for uuid in uuids}
        return {uuid: found for uuid, found in told.items() if found is not None}

    return _told(look)


def set_limits(group: Path, limits: Mapping[str, int | None]) -> None:
    """Set a control group's limits on cards, in bytes by UUID; None takes them away.

    Raises QueryError if the driver cannot, or may not.
    """

    def limit(session: nvml.NVMLSession) -> None:
        for uuid, limit_bytes in limits.items():
            session.set_memory_limits(session.with_uuid(uuid), str(group), limit_bytes)

    _told(limit)


def _told(look: Callable[[nvml.NVMLSession], T]) -> T:
    host = _host()
    try:
        return host.ask(lambda: host.told(look))
    except LateError as late:
        raise nvml.QueryError(_hangs(host.asked, late.waited_s)) from None


def take_here() -> Inventory:
    """Look at the GPUs in this very thread, and give NVML back, in a process that must not start threads.

    While the driver hangs this does not return.
    """
    host = _HeldNVML()
    try:
        return host.take_here()
    finally:
        host.forget()


def temperatures() -> dict[str, int]:
    """Return how warm cards are, in degrees Celsius by UUID, as far as the driver tells.

    Of the cards that the last :func:`take` of this process has found; empty after :func:`close`.
    """
    host = _host()
    with suppress(LateError):
        return host.ask(host.temperatures)
    return {}


def close() -> None:
    """Give NVML back, until the next :func:`take`.

    While a process holds it, it has the GPUs' device files open, which keeps an administrator from resetting
    them or changing their MIG mode.
    """
    _host().thread.close()


@dataclass(frozen=True)
class _CardFacts:
    """What of a card stays the same while NVML is held."""

    handle: nvml.Handle
    uuid: str
    name: str
    mig: bool  # whether it can be in MIG mode
    persistence_mode: bool | None
    minor: int | None  # the number in the name of its device file
    device_files: tuple[str, ...] | None


class _HeldNVML:
    """NVML as this process holds it. Nothing is started before the first snapshot."""

    def __init__(self) -> None:
        self.thread = NVMLThread(self.forget)
        self._session: nvml.NVMLSession | None = None
        self.driver_version: str | None = None
        self._cuda_version: tuple[int, int] | None = None
        self._cards: dict[int, _CardFacts] = {}
        self._last: dict[int, GPU] = {}  # of each card, for the name of one that answers no more
        self.asked = ""  # what the driver was asked for last, should it hang

    def ask(self, work: Callable[[], T]) -> T:
        """Run ``work`` in that thread and return its result; raises LateError."""
        return self.thread.ask(work, _START_S if self._session is None else _ANSWER_S)

    # In that thread, or in the only one ---------------------------------------------------------------------

    def take_here(self, processes: bool = False) -> Inventory:
        def look(session: nvml.NVMLSession) -> list[GPU]:
            return [
                gpu for index in range(session.count()) for gpu in self._read_card(session, index, processes)
            ]

        try:
            gpus = self.told(look)
        except nvml.QueryError as problem:
            return Inventory((), self.driver_version, str(problem))
        reason = None if gpus else _NO_GPU
        return Inventory(tuple(gpus), self.driver_version, reason, cuda_version=self._cuda_version)

    def told(self, look: Callable[[nvml.NVMLSession], T]) -> T:
        while True:
            was_open = self._session is not None
            try:
                return look(self._started())
            except nvml.QueryError as problem:
                self.forget()
                if not (was_open and problem.ends_session):  # else somebody shut it down under us
                    raise

    def temperatures(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if self._session is None:
            return found
        for card in self._cards.values():
            with suppress(nvml.QueryError):
                if (celsius := self._session.temperature_c(card.handle)) is not None:
                    found[card.uuid] = celsius
        return found

    def forget(self) -> None:
        session, self._session = self._session, None
        self._cards.clear()
        if session is not None:
            session.close()

    def _started(self) -> nvml.NVMLSession:
        self.asked = "to start"
        if self._session is None:
            self._session = nvml.NVMLSession()
            self.driver_version = self._session.driver_version()
            self._cuda_version = self._session.cuda_version()
        return self._session

    def _read_card(self, session: nvml.NVMLSession, index: int, processes: bool) -> list[GPU]:
        """Read a card and its MIG devices; one that fails is asked for anew once, its handle may be stale."""
        self.asked = f"about GPU {index}"
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
    # MIG devices come and go, and NVML may give the handle of an old one to a new one: never kept.
    handles = session.mig_devices(card.handle) if card.mig else None
    try:
        gpu = _read(session, index, card.handle, card.uuid, card.name, processes)
    except nvml.QueryError as problem:
        if handles is None or problem.ends_session:
            raise
        # Who may use MIG devices need not be allowed to look at the whole card.
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
            mig = replace(mig, device_files=_files_of_mig(session, card, handle), compute_mode=mode)
            mig = replace(mig, problem=prohibited or mig.problem)
        except nvml.QueryError as problem:
            if problem.ends_session:
                raise
            mig = _broken(index, None, str(problem))
        gpus.append(replace(mig, mig_parent=card.uuid))
    return gpus


def _files_of_mig(session: nvml.NVMLSession, card: _CardFacts, handle: nvml.Handle) -> tuple[str, ...] | None:
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
    """Return a GPU as this process may have it: of a limit that others have set on its group, no more."""
    least: tuple[int, int, str] | None = None
    for group in control_group.unified():
        try:
            told = session.memory_limits(card, str(group))
        except nvml.QueryError as problem:
            if problem.ends_session:
                raise
            continue  # as of the root of all groups, which has no limits
        if told is None:  # this driver knows no limits
            break
        _, hard, used = told
        if hard is not None and (least is None or hard - used < least[0] - least[1]):
            least = hard, used, str(group)
    if least is None or None in (gpu.total_bytes, gpu.free_bytes) or least[0] >= (gpu.total_bytes or 0):
        return gpu
    hard, used, name = least
    free = max(0, min(hard - used, gpu.free_bytes or 0))
    return replace(
        gpu, total_bytes=hard, used_bytes=hard - free, free_bytes=free, reserved_bytes=0, limited_by=name
    )


def _read_by_uuid(session: nvml.NVMLSession, uuid: str) -> GPU | None:
    try:
        # Each time anew: the handle of a MIG device may be another one's by now.
        return _read_use(session, session.with_uuid(uuid), uuid, processes=True)
    except nvml.QueryError as problem:
        if problem.ends_session:
            raise
        return None


def _read_use(session: nvml.NVMLSession, handle: nvml.Handle, uuid: str, processes: bool) -> GPU:
    # In this order: one that starts in between then counts as used by nobody we know, and not as unused.
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
        else tuple(GPUProcess(pid, bytes_, computes=computes) for pid, bytes_, computes in listed),
        problem=None if memory else _NO_MEMORY_FIGURES,
    )


def _hangs(asked: str, waited_s: float) -> str:
    return (
        f"NVIDIA's management library (NVML), asked {asked}, has not answered for {waited_s:.0f} s: the "
        "driver hangs, as when a GPU is lost. See the kernel's log (dmesg) for lines with NVRM or Xid; the "
        "machine may have to be restarted"
    )


def _broken(index: int, last: GPU | None, problem: str) -> GPU:
    uuid, name = (last.uuid, last.name) if last else ("", "")
    return GPU(index, uuid, name, None, None, None, None, None, None, problem=problem)


# One for each process that asks, since starting NVML takes tens of milliseconds. By pid, because a fork
# inherits the dict but can use neither the session nor a lock that another thread may have held.
_hosts: dict[int, _HeldNVML] = {}


def _host() -> _HeldNVML:
    pid = os.getpid()
    host = _hosts.get(pid)
    if host is None:
        host = _hosts.setdefault(pid, _HeldNVML())  # of two threads that come here, both get the same one
        for other in set(_hosts) - {pid}:
            _hosts.pop(other, None)
    return host


def _before_fork() -> None:
    if (host := _hosts.get(os.getpid())) is not None:
        host.thread.before_fork()


def _after_fork_in_parent() -> None:
    if (host := _hosts.get(os.getpid())) is not None:
        host.thread.after_fork_in_parent()


# A fork can neither use NVML as it finds it nor wait for an answer to a thread that it does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
