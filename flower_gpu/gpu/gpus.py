"""Records of GPUs, and the rules of ``CUDA_VISIBLE_DEVICES``, compute modes and MPS."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The folder of the MPS daemon ("Multi-Process Service", environment variables), its pipe, and its pid file
_PIPES_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
_PIPES: Final = "/tmp/nvidia-mps"
_CONTROL: Final = "control"
_PID_FILE: Final = "nvidia-cuda-mps-control.pid"


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
    # One of :data:`flower_gpu.gpu.nvml.COMPUTE_MODES`, for a MIG device the mode of its card; None if unknown
    compute_mode: str | None = None
    # Control group of this process that limits the memory. None if all memory of the card can be used
    limited_by: str | None = None

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

    def visible(self, cuda_visible_devices: str | None) -> tuple[GPU, ...]:
        """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` makes visible, in its order, including broken GPUs.

        The rules are those of CUDA, as PyTorch applies them to count devices without starting CUDA. The value
        is a list of indices, of UUIDs or prefixes of UUIDs of GPUs, or of UUIDs of MIG devices, not mixed.
        The list ends at the first entry that does not exist. It is empty if a GPU is named twice.

        There are two differences. Indices are those of ``nvidia-smi``, as with
        ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. A card in MIG mode stands for all its MIG devices, because each
        worker gets one of them. CUDA would show only one to a process.

        ``cuda_visible_devices``: value of the variable, or None if it is not set and all GPUs are visible.
        """
        cards = tuple(gpu for gpu in self.gpus if gpu.mig_parent is None)
        if cuda_visible_devices is None:
            return tuple(gpu for card in cards for gpu in self._devices(card))
        named: list[GPU] = []
        for entry in _entries(cuda_visible_devices):
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


def mps_pipes(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of a running MPS daemon that CUDA would use, or None."""
    folder = Path(environ.get(_PIPES_VARIABLE) or _PIPES)
    try:
        if not (folder / _CONTROL).exists():
            return None
    except OSError:  # a private folder of another account
        return None
    try:
        os.kill(int((folder / _PID_FILE).read_text()), 0)
    except ProcessLookupError:  # the daemon was killed and left its files behind
        return None
    except (OSError, ValueError):
        # The daemon belongs to another account or pid namespace, or has no pid file.
        return folder
    return folder


def is_exclusive(gpu: GPU, environ: Mapping[str, str]) -> bool:
    """Return True if only one process at a time can compute on the GPU.

    With MPS several can: the MPS server is the one process, and computes for all of its clients.
    """
    return (gpu.compute_mode or "").startswith("EXCLUSIVE") and mps_pipes(environ) is None
