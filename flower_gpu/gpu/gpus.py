"""Records of GPUs of any vendor, and the rules by which a variable makes some of them visible."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

#: Soft limit, hard limit and use of a control group on a GPU, in bytes. None for no limit.
Limits = tuple[int | None, int | None, int]


class QueryError(Exception):
    """A driver cannot answer. The text gives the reason and a way out.

    ``ends_session``: True if other code of this process has shut the driver's library down. A new session may
    work.
    """

    def __init__(self, message: str, *, ends_session: bool = False) -> None:
        super().__init__(message)
        self.ends_session = ends_session

    def raise_if_session_ended(self) -> None:
        """Raise the error if the session has ended. Other errors mean that one GPU or figure is missing."""
        if self.ends_session:
            raise self


@dataclass(frozen=True)
class GPUProcess:
    """A process on a GPU, as reported by the driver."""

    pid: int  # in a container, possibly the process id of the host
    used_bytes: int | None  # memory including the context, or None if the driver does not report it
    name: str = ""  # path of the program, empty if unknown or not requested
    computes: bool = True  # False for a process that only draws


@dataclass(frozen=True)
class GPU:
    """A GPU or MIG device at one moment. Figures are None if the driver does not report them."""

    index: int  # index as in ``nvidia-smi``; a MIG device has the index of its card
    uuid: str  # ``"GPU-..."`` or ``"MIG-..."``; empty for a broken GPU with an unknown UUID
    name: str  # model
    # Memory. The used part excludes the reserved part, except with drivers before 510
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int | None  # reserved by the driver; None with drivers before 510
    utilization_percent: int | None  # share of the last sample period with a running kernel
    processes: tuple[GPUProcess, ...] | None  # None if refused or not requested
    mig_parent: str | None = None  # UUID of the card of a MIG device
    problem: str | None = None  # why the GPU cannot be used, and what to do; None for a usable GPU
    # True if the driver stays loaded without clients. Read when NVML was started; None if unknown
    persistence_mode: bool | None = None
    device_files: tuple[str, ...] | None = None  # paths below /dev, or None if unknown
    # Mode of sharing as the vendor's tools name it, for a MIG device the mode of its card; None if unknown
    compute_mode: str | None = None
    # True if only one process at a time can compute on the GPU. With MPS several can: the MPS server is the
    # one process, and computes for all of its clients
    is_exclusive: bool = False
    # Control group of this process that limits the memory. None if all memory of the card can be used
    limited_by: str | None = None

    @classmethod
    def broken(cls, index: int, problem: str) -> GPU:
        """Return a GPU that cannot be used, without figures."""
        return cls(index, "", "", None, None, None, None, None, None, problem=problem)

    @property
    def is_usable(self) -> bool:
        """True if the GPU has no problem and its memory is known."""
        figures = (self.total_bytes, self.used_bytes, self.free_bytes)
        return self.problem is None and bool(self.uuid) and None not in figures

    def unlisted_bytes(self) -> int | None:
        """Return the bytes in use that no listed local process accounts for, or None if the use is unknown.

        In some containers, the driver lists none of the processes, or lists them with process ids of the
        host. With drivers before 510, the memory reserved by the driver is included.
        """
        if self.used_bytes is None:
            return None
        listed = sum(process.used_bytes or 0 for process in self.processes or () if _exists(process.pid))
        return max(0, self.used_bytes - listed)


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the host at one moment."""

    # In the order of their indices, including broken GPUs. A card in MIG mode has a problem and is followed
    # by its MIG devices
    gpus: tuple[GPU, ...]
    driver_version: str | None  # as ``nvidia-smi`` shows it
    problem: str | None  # why no GPU was found, and what to do
    hangs: bool = False  # True if the driver does not answer
    # The newest CUDA that the driver supports, such as ``(12, 4)``
    cuda_version: tuple[int, int] | None = None

    @property
    def usable(self) -> tuple[GPU, ...]:
        """The usable GPUs."""
        return tuple(gpu for gpu in self.gpus if gpu.is_usable)

    def find(self, uuid: str) -> GPU | None:
        """Return the GPU with this UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def visible(self, value: str | None) -> tuple[GPU, ...]:
        """Return the GPUs that the vendor's variable makes visible, in its order, including broken GPUs.

        CUDA has these rules for ``CUDA_VISIBLE_DEVICES``, as PyTorch applies them to count devices
        without starting CUDA. The value is a list of indices, of UUIDs or prefixes of UUIDs of GPUs, or of
        UUIDs of MIG devices, not mixed. The list ends at the first entry that does not exist. It is empty if
        a GPU is named twice.

        There are two differences. Indices are those of ``nvidia-smi``, as with
        ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. A card in MIG mode stands for all its MIG devices, because each
        worker gets a MIG device. CUDA would show only one to a process.

        ``value``: value of the variable, or None if it is not set and all GPUs are visible.
        """
        cards = tuple(gpu for gpu in self.gpus if gpu.mig_parent is None)
        if value is None:
            return tuple(gpu for card in cards for gpu in self._devices(card))
        named: list[GPU] = []
        for entry in _entries(value):
            if isinstance(entry, int):
                match = next((card for card in cards if card.index == entry), None)
            elif entry.startswith("MIG-"):
                match = next((gpu for gpu in self.gpus if gpu.mig_parent and gpu.uuid == entry), None)
            else:
                match = _with_uuid(cards, entry)
            if match is None:
                break
            if match in named:
                return ()
            named.append(match)
        return tuple(device for gpu in named for device in self._devices(gpu))

    def _devices(self, gpu: GPU) -> tuple[GPU, ...]:
        """Return the MIG devices of a card in MIG mode, or the GPU itself."""
        return tuple(other for other in self.gpus if other.mig_parent == gpu.uuid) or (gpu,)


def _entries(text: str) -> list[int] | list[str]:
    """Split the value of the variable. The first entry decides the kind of all entries."""
    parts = text.split(",")
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            same = [part.startswith(prefix) for part in parts]
            parts = parts[: same.index(False)] if False in same else parts
            return [] if len(set(parts)) < len(parts) else parts
    numbers: list[int] = []
    for part in parts:
        match = re.match(r"[+-]?[0-9]+", part.strip())  # text after a number is ignored, as by C's strtol
        number = int(match[0]) if match and len(match[0]) < 10 else -1
        if number < 0:
            break
        if number in numbers:
            return []
        numbers.append(number)
    return numbers


def _with_uuid(gpus: tuple[GPU, ...], text: str) -> GPU | None:
    """Return the GPU with this UUID, or the only GPU with this prefix of its UUID."""
    if not text.startswith(("GPU-", "MIG-")):
        return None
    for gpu in gpus:
        if gpu.uuid == text:
            return gpu
    matches = [gpu for gpu in gpus if gpu.uuid.startswith(text)]
    return matches[0] if len(matches) == 1 else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another account
        return True
    return True
