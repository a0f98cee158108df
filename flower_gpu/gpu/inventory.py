"""The host's GPUs at one moment: what each is, how full, and why one cannot be used."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, replace

from flower_gpu.gpu import nvml

_MIG_CARD = "MIG mode is on: its MIG devices are used instead"
_MIG_CARD_WITHOUT_DEVICES = (
    "MIG mode is on and it has no MIG device: make some (nvidia-smi mig -cgi PROFILE -C), or turn MIG mode "
    "off (nvidia-smi -i INDEX -mig 0)"
)
_NO_MEMORY_FIGURES = "its driver does not tell how much memory it has and uses, so it cannot be shared out"
_NO_GPU = (
    "the NVIDIA driver runs and shows no GPU: see nvidia-smi; in a container, start that with access to the "
    "GPUs (docker run --gpus all)"
)


@dataclass(frozen=True)
class GPUProcess:
    """A process on a GPU, as the driver tells.

    Parameters
    ----------
    pid : int
        Its number; in a container it may be that of the host.
    used_bytes : int or None
        Memory it uses, context included; None where the driver does not tell.
    name : str
        Its program; empty where not known.
    """

    pid: int
    used_bytes: int | None
    name: str = ""


@dataclass(frozen=True)
class GPU:
    """A GPU or MIG device at one moment. Figures are None where the driver does not tell them.

    Parameters
    ----------
    index : int
        Its number, as in ``nvidia-smi``; a MIG device has its card's.
    uuid : str
        ``"GPU-..."`` or ``"MIG-..."``; empty for a broken one that never told.
    name : str
        Its model.
    total_bytes, used_bytes, free_bytes : int or None
        Its memory. Used is without what the driver reserves, except with drivers before 510.
    reserved_bytes : int or None
        What the driver keeps for itself; None with drivers before 510.
    utilization_percent : int or None
        How much of the last moments it was computing.
    processes : tuple of GPUProcess, or None
        Who uses it; None: not told, or not asked.
    mig_parent : str, optional
        UUID of the card that a MIG device is on.
    problem : str, optional
        Why it cannot be used, and what to do. None: it can.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int | None
    utilization_percent: int | None
    processes: tuple[GPUProcess, ...] | None
    mig_parent: str | None = None
    problem: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it works and its memory is known: what is not known counts against it."""
        figures = (self.total_bytes, self.used_bytes, self.free_bytes)
        return self.problem is None and bool(self.uuid) and None not in figures


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the host at one moment.

    Parameters
    ----------
    gpus : tuple of GPU
        In the order of their numbers, broken ones too. A card in MIG mode has a problem and is followed by
        its MIG devices.
    driver_version : str or None
        As ``nvidia-smi`` shows it.
    problem : str or None
        Why there are none, and what to do.
    """

    gpus: tuple[GPU, ...]
    driver_version: str | None
    problem: str | None

    @property
    def usable(self) -> tuple[GPU, ...]:
        """Those that can be used."""
        return tuple(gpu for gpu in self.gpus if gpu.is_usable)

    def find(self, which: int | str) -> GPU | None:
        """Return the GPU with this number, UUID, or beginning of a UUID that only one has; else None."""
        if isinstance(which, str) and re.fullmatch(r"[0-9]{1,9}", which):
            which = int(which)
        if isinstance(which, int):
            cards = (gpu for gpu in self.gpus if gpu.mig_parent is None)
            return next((gpu for gpu in cards if gpu.index == which), None)
        return _with_uuid(self.gpus, which)


def take(*, processes: bool = True) -> Inventory:
    """Look at the host's GPUs now.

    NVML is started with the first call in a process (and again in a fork, or when somebody has shut it down),
    and kept until :func:`close`. Safe to call from several threads; not in the fork of a process that was
    doing so in another thread at that moment.

    Parameters
    ----------
    processes : bool
        Whether to ask who uses each GPU, which takes several times as long.

    Returns
    -------
    Inventory
        Never raises: what cannot be had is missing, with the reason in words.
    """
    return _host().take(processes)


def temperatures() -> dict[str, int]:
    """Return how warm cards are, in degrees Celsius by UUID, as far as the driver tells.

    Of the cards that the last :func:`take` of this process has found; empty after :func:`close`.
    """
    return _host().temperatures()


def close() -> None:
    """Give NVML back, until the next :func:`take`.

    While a process holds it, it has the GPUs' device files open, which keeps an administrator from resetting
    them or changing their MIG mode.
    """
    _host().close()


def visible(inventory: Inventory, cuda_visible_devices: str | None) -> tuple[GPU, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to a process, in its order, broken ones too.

    The rules are CUDA's, as PyTorch follows them when it counts devices without starting CUDA: numbers, or
    UUIDs of GPUs or the beginnings of such, or UUIDs of MIG devices, not mixed; all up to the first that does
    not exist; none if one is named twice. Two things are different. Numbers are those of ``nvidia-smi``, as
    with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. And a card in MIG mode stands for all its MIG devices, of which
    CUDA shows a process only one: each worker gets one of them.

    Parameters
    ----------
    inventory : Inventory
        The host's GPUs.
    cuda_visible_devices : str or None
        The variable's value; None: it is not set, and all are visible. ``""``: none are.

    See Also
    --------
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    """
    cards = tuple(gpu for gpu in inventory.gpus if gpu.mig_parent is None)
    if cuda_visible_devices is None:
        return tuple(gpu for card in cards for gpu in _devices(inventory, card))
    named: list[GPU] = []
    for entry in _entries(cuda_visible_devices):
        if isinstance(entry, int):
            found = next((card for card in cards if card.index == entry), None)
        elif entry.startswith("MIG-"):
            found = next((gpu for gpu in inventory.gpus if gpu.mig_parent and gpu.uuid == entry), None)
        else:
            found = _with_uuid(cards, entry)
        if found is None:
            break
        if found in named:
            return ()
        named.append(found)
    return tuple(gpu for found in named for gpu in _devices(inventory, found))


def _entries(text: str) -> list[int] | list[str]:
    """Split the variable's value; the first entry decides what all of them are."""
    parts = text.split(",")
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            same = [part.startswith(prefix) for part in parts]
            parts = parts[: same.index(False)] if False in same else parts
            return [] if len(set(parts)) < len(parts) else parts
    numbers: list[int] = []
    for part in parts:
        found = re.match(r"[+-]?[0-9]+", part.strip())  # as C's strtol: what follows a number is ignored
        number = int(found[0]) if found and len(found[0]) < 10 else -1
        if number < 0:
            break
        if number in numbers:
            return []
        numbers.append(number)
    return numbers


def _with_uuid(gpus: tuple[GPU, ...], text: str) -> GPU | None:
    """Return the GPU with this UUID, or the only one whose UUID begins so."""
    if not text.startswith(("GPU-", "MIG-")):
        return None
    for gpu in gpus:
        if gpu.uuid == text:
            return gpu
    found = [gpu for gpu in gpus if gpu.uuid.startswith(text)]
    return found[0] if len(found) == 1 else None


def _devices(inventory: Inventory, gpu: GPU) -> tuple[GPU, ...]:
    """Return what a program can use of a GPU: itself, or the MIG devices of a card in MIG mode."""
    on_it = tuple(
        other for other in inventory.gpus if other.mig_parent is not None and other.mig_parent == gpu.uuid
    )
    return on_it or (gpu,)


@dataclass(frozen=True)
class _Card:
    """What of a card stays the same while NVML is held."""

    handle: nvml.Handle
    uuid: str
    name: str
    mig: bool  # whether it can be in MIG mode


class _Host:
    """NVML as this process holds it. Nothing is started before the first snapshot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: nvml.Session | None = None
        self._driver_version: str | None = None
        self._cards: dict[int, _Card] = {}
        self._last: dict[int, GPU] = {}  # of each card, for the name of one that answers no more

    def take(self, processes: bool) -> Inventory:
        with self._lock:
            try:
                was_open = self._session is not None
                try:
                    return self._snapshot(processes)
                except nvml.QueryError as problem:
                    self._forget()
                    if not (was_open and problem.ends_session):
                        raise
                    return self._snapshot(processes)  # somebody shut it down under us
            except nvml.QueryError as problem:
                self._forget()
                return Inventory((), self._driver_version, str(problem))

    def temperatures(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._lock:
            if self._session is None:
                return found
            for card in self._cards.values():
                with suppress(nvml.QueryError):
                    if (celsius := self._session.temperature_c(card.handle)) is not None:
                        found[card.uuid] = celsius
        return found

    def close(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        session, self._session = self._session, None
        self._cards.clear()
        if session is not None:
            session.close()

    def _snapshot(self, processes: bool) -> Inventory:
        if self._session is None:
            self._session = nvml.Session()
            self._driver_version = self._session.driver_version()
        gpus = [
            gpu
            for index in range(self._session.count())
            for gpu in self._read_card(self._session, index, processes)
        ]
        return Inventory(tuple(gpus), self._driver_version, None if gpus else _NO_GPU)

    def _read_card(self, session: nvml.Session, index: int, processes: bool) -> list[GPU]:
        """Read a card and its MIG devices; one that fails is asked for anew once, its handle may be stale."""
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


def _new_card(session: nvml.Session, index: int) -> _Card:
    handle = session.card(index)
    mig = True
    try:
        session.mig_devices(handle)
    except nvml.QueryError as problem:
        if not problem.is_absence:
            raise
        mig = False
    return _Card(handle, session.uuid(handle), session.name(handle), mig)


def _read_devices(session: nvml.Session, index: int, card: _Card, processes: bool) -> list[GPU]:
    # MIG devices come and go, and NVML may give the handle of an old one to a new one: never kept.
    handles = session.mig_devices(card.handle) if card.mig else None
    try:
        gpu = _read(session, index, card.handle, card.uuid, card.name, processes)
    except nvml.QueryError as problem:
        if handles is None or problem.ends_session:
            raise
        # Who may use MIG devices need not be allowed to look at the whole card.
        gpu = replace(_broken(index, None, ""), uuid=card.uuid, name=card.name)
    if handles is None:
        return [gpu]
    gpus = [replace(gpu, problem=_MIG_CARD if handles else _MIG_CARD_WITHOUT_DEVICES)]
    for handle in handles:
        try:
            if isinstance(handle, nvml.QueryError):
                raise handle
            mig = _read(session, index, handle, session.uuid(handle), session.name(handle), processes)
        except nvml.QueryError as problem:
            if problem.ends_session:
                raise
            mig = _broken(index, None, str(problem))
        gpus.append(replace(mig, mig_parent=card.uuid))
    return gpus


def _read(
    session: nvml.Session, index: int, handle: nvml.Handle, uuid: str, name: str, processes: bool
) -> GPU:
    memory = session.memory(handle)
    listed = session.processes(handle) if processes else None
    return GPU(
        index=index,
        uuid=uuid,
        name=name,
        total_bytes=memory.total_bytes if memory else None,
        used_bytes=memory.used_bytes if memory else None,
        free_bytes=memory.free_bytes if memory else None,
        reserved_bytes=memory.reserved_bytes if memory else None,
        utilization_percent=session.utilization_percent(handle),
        processes=None if listed is None else tuple(GPUProcess(*process) for process in listed),
        problem=None if memory else _NO_MEMORY_FIGURES,
    )


def _broken(index: int, last: GPU | None, problem: str) -> GPU:
    uuid, name = (last.uuid, last.name) if last else ("", "")
    return GPU(index, uuid, name, None, None, None, None, None, None, problem=problem)


# One for each process that asks, since starting NVML takes tens of milliseconds. By pid, because a fork
# inherits the dict but can use neither the session nor a lock that another thread may have held.
_hosts: dict[int, _Host] = {}


def _host() -> _Host:
    pid = os.getpid()
    host = _hosts.get(pid)
    if host is None:
        host = _hosts.setdefault(pid, _Host())  # of two threads that come here, both get the same one
        for other in set(_hosts) - {pid}:
            _hosts.pop(other, None)
    return host
