"""A GPU, all GPUs of a host at one moment, and those that ``CUDA_VISIBLE_DEVICES`` leaves to a process.

Also whether several processes can share a card: by its compute mode, and by NVIDIA's MPS.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Where the daemon listens ("Multi-Process Service", environment variables), and the file with its number.
_PIPES_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
_PIPES: Final = "/tmp/nvidia-mps"
_CONTROL: Final = "control"
_PID_FILE: Final = "nvidia-cuda-mps-control.pid"


@dataclass(frozen=True)
class GPUProcess:
    """A process on a GPU, as the driver tells."""

    pid: int  # its number; in a container it may be that of the host
    used_bytes: int | None  # memory it uses, context included; None where the driver does not tell
    name: str = ""  # its program; empty where not known, or not asked
    computes: bool = True  # and does not only draw


@dataclass(frozen=True)
class GPU:
    """A GPU or MIG device at one moment. Figures are None where the driver does not tell them."""

    index: int  # its number, as in ``nvidia-smi``; a MIG device has its card's
    uuid: str  # ``"GPU-..."`` or ``"MIG-..."``; empty for a broken one that never told
    name: str  # its model
    # Its memory. Used is without what the driver reserves, except with drivers before 510.
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int | None  # what the driver keeps for itself; None with drivers before 510
    utilization_percent: int | None  # how much of the last moments it was computing
    processes: tuple[GPUProcess, ...] | None  # who uses it; None: not told, or not asked
    mig_parent: str | None = None  # UUID of the card that a MIG device is on
    problem: str | None = None  # Why it cannot be used, and what to do. None: it can.
    # Whether the driver keeps it ready while nobody uses it, as it was when NVML was started; None where
    # that is not told
    persistence_mode: bool | None = None
    device_files: tuple[str, ...] | None = None  # by which it is opened; None where they are not known
    # One of :data:`flower_gpu.gpu.nvml.COMPUTE_MODES`, that of its card; None where that is not told
    compute_mode: str | None = None
    # The control group of this process whose limit its memory is; None: it is all that the card has
    limited_by: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it works and its memory is known."""
        figures = (self.total_bytes, self.used_bytes, self.free_bytes)
        return self.problem is None and bool(self.uuid) and None not in figures

    def unlisted_bytes(self) -> int | None:
        """Return how much of it is used by nobody whom the driver lists, and who is here, in bytes.

        In some containers it lists none of their processes, or all by the numbers of the host. Also what
        drivers before 510 keep for themselves is used by nobody.

        Returns None where it is not told how much is used.
        """
        if self.used_bytes is None:
            return None
        listed = sum(process.used_bytes or 0 for process in self.processes or () if _is_here(process.pid))
        return max(0, self.used_bytes - listed)


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the host at one moment."""

    # In the order of their numbers, broken ones too. A card in MIG mode has a problem and is followed by
    # its MIG devices.
    gpus: tuple[GPU, ...]
    driver_version: str | None  # as ``nvidia-smi`` shows it
    problem: str | None  # why there are none, and what to do
    hangs: bool = False  # whether that is because the driver does not answer
    # The newest CUDA that the driver supports, such as ``(12, 4)``
    cuda_version: tuple[int, int] | None = None

    @property
    def usable(self) -> tuple[GPU, ...]:
        """Those that can be used."""
        return tuple(gpu for gpu in self.gpus if gpu.is_usable)

    def find(self, uuid: str) -> GPU | None:
        """Return the GPU with this UUID; None where there is none."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def visible(self, cuda_visible_devices: str | None) -> tuple[GPU, ...]:
        """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to a process, in its order, broken ones too.

        The rules are CUDA's, as PyTorch follows them when it counts devices without starting CUDA: numbers,
        or UUIDs of GPUs or the beginnings of such, or UUIDs of MIG devices, not mixed; all up to the first
        that does not exist; none if one is named twice. Two things are different. Numbers are those of
        ``nvidia-smi``, as with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. And a card in MIG mode stands for all its
        MIG devices, of which CUDA shows a process only one: each worker gets one of them.

        ``cuda_visible_devices``: the variable's value; None: it is not set, and all are visible.
        """
        cards = tuple(gpu for gpu in self.gpus if gpu.mig_parent is None)
        if cuda_visible_devices is None:
            return tuple(gpu for card in cards for gpu in self._devices(card))
        named: list[GPU] = []
        for entry in _entries(cuda_visible_devices):
            if isinstance(entry, int):
                found = next((card for card in cards if card.index == entry), None)
            elif entry.startswith("MIG-"):
                found = next((gpu for gpu in self.gpus if gpu.mig_parent and gpu.uuid == entry), None)
            else:
                found = _with_uuid(cards, entry)
            if found is None:
                break
            if found in named:
                return ()
            named.append(found)
        return tuple(gpu for found in named for gpu in self._devices(found))

    def _devices(self, gpu: GPU) -> tuple[GPU, ...]:
        """Return the devices of a GPU for programs: itself, or the MIG devices of a card in MIG mode."""
        return tuple(other for other in self.gpus if other.mig_parent == gpu.uuid) or (gpu,)


def _entries(text: str) -> list[int] | list[str]:
    """Split the variable's value; the first entry decides the kind of all."""
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


def _is_here(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another account's
        return True
    return True


def mps_pipes(environ: Mapping[str, str]) -> Path | None:
    """Return the folder by which CUDA finds a running MPS daemon; None where it finds none."""
    folder = Path(environ.get(_PIPES_VARIABLE) or _PIPES)
    try:
        if not (folder / _CONTROL).exists():
            return None
    except OSError:  # another account's, that nobody else enters
        return None
    try:
        os.kill(int((folder / _PID_FILE).read_text()), 0)
    except ProcessLookupError:  # it was killed, and has left its files
        return None
    except (OSError, ValueError):  # another account's, of another namespace, or without such a file
        return folder
    return folder


def is_for_one(gpu: GPU, environ: Mapping[str, str]) -> bool:
    """Tell whether one process at a time can compute on a GPU.

    The server of an MPS daemon is one process, and computes for all of its clients.
    """
    return (gpu.compute_mode or "").startswith("EXCLUSIVE") and mps_pipes(environ) is None
