"""NVIDIA's GPUs: what NVML says about cards, MIG devices and their processes, and the driver's names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NewType

from flower_gpu import control_group, unkillable
from flower_gpu.gpu.gpus import GPU, GPUProcess, Limits, QueryError
from flower_gpu.gpu.nvml import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_DRIVER,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    NVML,
    AbsentError,
    NVMLError,
)
from flower_gpu.printable import printable

#: A card or MIG device, valid in one session of one process.
_Handle = NewType("_Handle", object)

_MIG_CARD: Final = "MIG mode is on: its MIG devices are used instead"
_MIG_CARD_WITHOUT_DEVICES: Final = (
    "MIG mode is on and it has no MIG device: make some (nvidia-smi mig -cgi PROFILE -C), or turn MIG mode "
    "off (nvidia-smi -i INDEX -mig 0)"
)
_PROHIBITED: Final = (
    "its compute mode is PROHIBITED, so no program may use it: as root, nvidia-smi -i {} -c DEFAULT"
)
_NO_MEMORY_FIGURES: Final = (
    "its driver does not report how much memory it has and uses, so it cannot be shared out"
)
_LIMIT_ERRORS: Final = {
    NO_PERMISSION: "this account may not set limits of control groups: root may",
    NOT_SUPPORTED: "its driver sets no limits on this GPU",
    FUNCTION_NOT_FOUND: "drivers before 615 do not support limits of control groups",
}
#: Compute modes as ``nvidia-smi -c`` names them: any number of processes, one thread's, none, or one process.
_COMPUTE_MODES: Final = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}

_DEV: Final = Path("/dev")
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
#: Lines such as "gpu0/gi1/ci0/access 13" (NVIDIA's MIG user guide, "Device Nodes and Capabilities").
_MIG_MINORS: Final = Path("/proc/driver/nvidia-caps/mig-minors")
_CONTROL: Final = _DEV / "nvidiactl"
_UNIFIED_MEMORY: Final = _DEV / "nvidia-uvm"

# The folder of the MPS daemon ("Multi-Process Service", environment variables), its pipe, and its pid file
_PIPES_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
_PIPES: Final = "/tmp/nvidia-mps"
_MPS_CONTROL: Final = "control"
_PID_FILE: Final = "nvidia-cuda-mps-control.pid"


class NVIDIA:
    """The driver of NVIDIA's GPUs."""

    name = "NVIDIA"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    # Numbers in CUDA_VISIBLE_DEVICES are those of nvidia-smi.
    variables: Mapping[str, str] = MappingProxyType({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    absent = NO_DRIVER
    no_gpu = (
        "the NVIDIA driver runs but shows no GPU: see nvidia-smi; in a container, start that with access to "
        "the GPUs (docker run --gpus all)"
    )
    device_prefix = "nvidia"
    pci_vendor = "0x10de"
    shared_files: tuple[str, ...] = (str(_CONTROL), str(_UNIFIED_MEMORY), f"{_DEV}/nvidia-uvm-tools")

    def is_present(self) -> bool:
        """Return True if parts of the driver are present."""
        return Path("/proc/driver/nvidia/version").exists() or any(_DEV.glob("nvidia[0-9]*"))

    def start(self) -> NVIDIASession:
        """Start NVML, which takes tens of milliseconds."""
        return NVIDIASession()

    def why_late(self, query: str, waited_s: float) -> str:
        """Return the problem of an NVML that does not answer."""
        return (
            f"NVIDIA's management library (NVML), asked {query}, has not answered for {waited_s:.0f} s: the "
            "driver hangs, as when a GPU is lost. See the kernel's log (dmesg) for lines with NVRM or Xid; "
            "the machine may have to be restarted"
        )

    def create_files(self) -> None:
        """Let NVIDIA's helper create the device file that CUDA creates at its start."""
        if _CONTROL.exists() and not _UNIFIED_MEMORY.exists():
            with suppress(OSError, subprocess.SubprocessError):
                unkillable.run(["nvidia-modprobe", "-u", "-c", "0"], timeout_s=30)


@dataclass(frozen=True)
class _CardFacts:
    """Facts about a card that do not change while NVML is running."""

    handle: _Handle
    uuid: str
    name: str
    mig: bool  # True if the card supports MIG
    persistence_mode: bool | None
    minor: int | None  # number in the name of the device file
    device_files: tuple[str, ...] | None


class NVIDIASession:
    """NVML in this process, see :class:`.DriverSession`."""

    def __init__(self) -> None:
        self._nvml = NVML()
        self._cards: dict[int, _CardFacts] = {}
        self.query = "to start"
        self.driver_version = self._nvml.optional(str, "nvmlSystemGetDriverVersion")
        self.cuda_version = self._nvml.optional(_cuda_version, "nvmlSystemGetCudaDriverVersion_v2")

    def close(self) -> None:
        """Shut NVML down, which closes ``/dev/nvidiactl`` and the GPUs' files."""
        self._nvml.close()

    def gpus(self, processes: bool) -> list[GPU]:
        """Return all cards, each followed by its MIG devices."""
        self.query = "for the number of GPUs"
        number = int(self._nvml.call("nvmlDeviceGetCount"))
        return [gpu for index in range(number) for gpu in self._read_card(index, processes)]

    def gpus_with(self, uuids: Sequence[str]) -> tuple[GPU, ...]:
        """Return memory and processes of these cards and MIG devices. Broken GPUs are left out."""
        gpus = []
        for uuid in uuids:
            self.query = f"about {uuid}"
            try:
                # With a new handle each time, because NVML may reuse the handle of a removed MIG device.
                gpus.append(self._read_use(self._with_uuid(uuid), uuid, processes=True))
            except QueryError as problem:
                problem.raise_if_session_ended()
        return tuple(gpus)

    def temperatures(self) -> dict[str, int]:
        """Return the temperatures of known cards, by UUID."""
        kind = self._nvml.names.NVML_TEMPERATURE_GPU
        degrees = {
            card.uuid: self._nvml.optional(int, "nvmlDeviceGetTemperature", card.handle, kind)
            for card in self._cards.values()
        }
        return {uuid: celsius for uuid, celsius in degrees.items() if celsius is not None}

    def limits(self, group: str, uuids: Iterable[str]) -> dict[str, Limits]:
        """Return the limits and the use of a control group on cards, by UUID."""
        by_uuid = {uuid: self._limits(self._with_uuid(uuid), group) for uuid in uuids}
        return {uuid: limits for uuid, limits in by_uuid.items() if limits is not None}

    def set_limits(self, group: str, limits: Mapping[str, int | None]) -> None:
        """Set both limits of a control group on cards, or remove them with None. Raises QueryError."""
        kind = getattr(self._nvml.names, "c_nvmlSetMemoryLimits_v1_t", None)
        if kind is None:
            raise QueryError("nvidia-ml-py is older than 13.615: pip install --upgrade nvidia-ml-py")
        no_limit = self._nvml.names.NVML_DEVICE_MEMORY_LIMIT_MAX
        for uuid, limit_bytes in limits.items():
            hard = no_limit if limit_bytes is None else limit_bytes
            figures = kind(nameSpace=group.encode(), softLimit=limit_bytes or 0, hardLimit=hard)
            card = self._with_uuid(uuid)
            try:
                self._nvml.call("nvmlDeviceSetMemoryLimits_v1", card, figures)
            except NVMLError as problem:
                text = _LIMIT_ERRORS.get(problem.code)
                raise problem if text is None else NVMLError(text, problem.code) from None

    def _with_uuid(self, uuid: str) -> _Handle:
        """Return a card or MIG device, without opening others."""
        return _Handle(self._nvml.call("nvmlDeviceGetHandleByUUID", uuid))

    def _read_card(self, index: int, processes: bool) -> list[GPU]:
        """Read a card and its MIG devices. On failure, retry once with a new handle."""
        self.query = f"about GPU {index}"
        while True:
            known = self._cards.pop(index, None)
            try:
                card = known or self._new_card(index)
                gpus = self._read_devices(index, card, processes)
            except QueryError as problem:
                problem.raise_if_session_ended()
                if known is not None:
                    continue
                return [GPU.broken(index, str(problem))]
            self._cards[index] = card
            return gpus

    def _new_card(self, index: int) -> _CardFacts:
        nvml = self._nvml
        handle = _Handle(nvml.call("nvmlDeviceGetHandleByIndex", index))
        mig = True
        try:
            self._mig_devices(handle)
        except AbsentError:
            mig = False
        minor = nvml.optional(int, "nvmlDeviceGetMinorNumber", handle)
        bus_id = nvml.optional(_bus_id, "nvmlDeviceGetPciInfo", handle)
        return _CardFacts(
            handle,
            uuid=self._uuid(handle),
            name=self._name(handle),
            mig=mig,
            persistence_mode=nvml.optional(bool, "nvmlDeviceGetPersistenceMode", handle),
            minor=minor,
            device_files=None if minor is None else (f"{_DEV}/nvidia{minor}", *_render_nodes(bus_id)),
        )

    def _uuid(self, handle: _Handle) -> str:
        return str(self._nvml.call("nvmlDeviceGetUUID", handle))

    def _name(self, handle: _Handle) -> str:
        return str(self._nvml.call("nvmlDeviceGetName", handle))

    def _read_devices(self, index: int, card: _CardFacts, processes: bool) -> list[GPU]:
        # Handles of MIG devices are never kept. NVML may reuse the handle of a removed device for a new one.
        handles = self._mig_devices(card.handle) if card.mig else None
        try:
            gpu = self._read(index, card.handle, card.uuid, card.name, processes)
        except QueryError as problem:
            if handles is None:
                raise
            problem.raise_if_session_ended()
            # An account with access to MIG devices may lack access to the whole card.
            gpu = replace(GPU.broken(index, ""), uuid=card.uuid, name=card.name)
        mode = self._nvml.optional(_COMPUTE_MODES.get, "nvmlDeviceGetComputeMode", card.handle)
        is_exclusive = (mode or "").startswith("EXCLUSIVE") and mps_pipes(os.environ) is None
        prohibited = _PROHIBITED.format(index) if mode == "PROHIBITED" else None

        def with_mode(gpu: GPU, files: tuple[str, ...] | None) -> GPU:
            problem = prohibited or gpu.problem
            return replace(
                gpu, device_files=files, compute_mode=mode, is_exclusive=is_exclusive, problem=problem
            )

        gpu = replace(with_mode(gpu, card.device_files), persistence_mode=card.persistence_mode)
        if handles is None:
            return [gpu]
        gpus = [replace(gpu, problem=_MIG_CARD if handles else _MIG_CARD_WITHOUT_DEVICES)]
        for handle in handles:
            try:
                if isinstance(handle, QueryError):
                    raise handle
                mig = self._read(index, handle, self._uuid(handle), self._name(handle), processes)
                mig = with_mode(mig, self._mig_device_files(card, handle))
            except QueryError as problem:
                problem.raise_if_session_ended()
                mig = GPU.broken(index, str(problem))
            gpus.append(replace(mig, mig_parent=card.uuid))
        return gpus

    def _mig_devices(self, card: _Handle) -> list[_Handle | QueryError] | None:
        """Return the MIG devices of a card, with an error for each inaccessible one. None if MIG mode is off.

        Raises AbsentError if the card or its driver does not support MIG.
        """
        current, _ = self._nvml.call("nvmlDeviceGetMigMode", card)
        if not current:
            return None
        devices: list[_Handle | QueryError] = []
        for number in range(int(self._nvml.call("nvmlDeviceGetMaxMigDeviceCount", card))):
            try:
                handle = self._nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", card, number)
                devices.append(_Handle(handle))
            except NVMLError as problem:
                problem.raise_if_session_ended()
                if problem.code not in (NOT_FOUND, INVALID_ARGUMENT):  # no device has this number
                    devices.append(problem)
        return devices

    def _mig_device_files(self, card: _CardFacts, handle: _Handle) -> tuple[str, ...] | None:
        gpu_instance, compute_instance = (
            self._nvml.optional(int, f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute")
        )
        if card.minor is None or gpu_instance is None or compute_instance is None:
            return None
        return files_of_mig(card.minor, gpu_instance, compute_instance)

    def _read(self, index: int, handle: _Handle, uuid: str, name: str, processes: bool) -> GPU:
        gpu = self._read_use(handle, uuid, processes)
        named = gpu.processes and tuple(
            replace(process, name=self._process_name(process.pid)) for process in gpu.processes
        )
        # MIG devices have no figure: the share of the last sample period with a running kernel.
        percent = self._nvml.optional(lambda rates: int(rates.gpu), "nvmlDeviceGetUtilizationRates", handle)
        gpu = gpu if uuid.startswith("MIG-") else self._limited(handle, gpu)
        return replace(gpu, index=index, name=name, utilization_percent=percent, processes=named)

    def _read_use(self, handle: _Handle, uuid: str, processes: bool) -> GPU:
        # Processes before memory: the memory of a process that starts in between then counts as used by an
        # unknown process, and not as free.
        listed = self._processes(handle) if processes else None
        figures = self._memory(handle)
        if figures is None:
            return replace(GPU.broken(-1, _NO_MEMORY_FIGURES), uuid=uuid, processes=listed)
        return GPU(-1, uuid, "", *figures, None, listed)

    def _memory(self, handle: _Handle) -> tuple[int, int, int, int | None] | None:
        """Return the memory of a GPU in bytes: total, used, free and reserved by the driver.

        Used and free exclude the reserved part. With drivers before 510, used includes the reserved part, and
        the last item is None. Returns None without figures, as for GPUs that share the host's memory.
        """
        nvml = self._nvml
        for version in ((nvml.names.nvmlMemory_v2,), ()):
            with suppress(AbsentError):
                figures = nvml.call("nvmlDeviceGetMemoryInfo", handle, *version)
                if figures.total <= 0:  # a wrong answer of the driver
                    return None
                reserved = int(figures.reserved) if version else None
                return int(figures.total), int(figures.used), int(figures.free), reserved
        return None

    def _limited(self, card: _Handle, gpu: GPU) -> GPU:
        """Return a GPU with its memory reduced to the limit of this process's control groups."""
        tightest: tuple[int, int, str] | None = None
        for group in control_group.unified():
            try:
                limits = self._limits(card, str(group))
            except QueryError as problem:
                problem.raise_if_session_ended()
                continue  # for example the root group, which has no limits
            if limits is None:  # this driver does not support limits
                break
            _, hard, used = limits
            if hard is not None and (tightest is None or hard - used < tightest[0] - tightest[1]):
                tightest = hard, used, str(group)
        if tightest is None or gpu.total_bytes is None or tightest[0] >= gpu.total_bytes:
            return gpu
        hard, used, name = tightest
        free = max(0, min(hard - used, gpu.free_bytes or 0))
        return replace(
            gpu, total_bytes=hard, used_bytes=hard - free, free_bytes=free, reserved_bytes=0, limited_by=name
        )

    def _limits(self, card: _Handle, group: str) -> Limits | None:
        """Return the limits of a control group on a card, or None if they are not supported."""
        kind = getattr(self._nvml.names, "c_nvmlGetMemoryLimits_v1_t", None)
        if kind is None:  # nvidia-ml-py before 13.615
            return None
        limits = kind(nameSpace=group.encode())
        try:
            self._nvml.call("nvmlDeviceGetMemoryLimits_v1", card, limits)
        except AbsentError:
            return None
        no_limit = self._nvml.names.NVML_DEVICE_MEMORY_LIMIT_MAX
        hard = None if limits.hardLimit == no_limit else int(limits.hardLimit)
        return int(limits.softLimit) or None, hard, int(limits.currentUsed)

    def _processes(self, handle: _Handle) -> tuple[GPUProcess, ...] | None:
        """Return the processes on a GPU without their names, or None if the list is refused.

        Process ids may belong to another namespace (containers), or to ended processes.
        """
        by_pid: dict[int, GPUProcess] = {}
        # MPSCompute lists the clients of an MPS server.
        for kind in ("Compute", "MPSCompute", "Graphics"):
            try:
                running = self._running(kind, handle)
            except QueryError as problem:
                problem.raise_if_session_ended()
                running = None
            if running is None and kind == "Compute":
                return None
            for process in running or ():
                # A process that computes and draws is in two lists, with its total memory in both.
                pid = int(process.pid)
                known = by_pid.get(pid) or GPUProcess(pid, None, computes=kind != "Graphics")
                if process.usedGpuMemory is not None:
                    used = max(int(process.usedGpuMemory), known.used_bytes or 0)
                    known = replace(known, used_bytes=used)
                by_pid[pid] = known
        return tuple(by_pid[pid] for pid in sorted(by_pid))

    def _running(self, kind: str, handle: _Handle) -> list[Any] | None:
        # Functions with a version. Those without one raise a different error with older drivers.
        for version in ("v3", "v2"):
            with suppress(AbsentError):
                return list(self._nvml.call(f"nvmlDeviceGet{kind}RunningProcesses_{version}", handle))
        return None

    def _process_name(self, pid: int) -> str:
        """Return the program of a process as printable text, or an empty text if unknown."""
        with suppress(UnicodeDecodeError):  # a path may consist of any bytes
            return printable(self._nvml.optional(str, "nvmlSystemGetProcessName", pid) or "")
        return ""


def _cuda_version(number: int) -> tuple[int, int] | None:
    return (number // 1000, number % 1000 // 10) if number > 0 else None


def _bus_id(info: Any) -> str:
    """Return the PCI address of a card, such as ``"00000000:3B:00.0"``."""
    return info.busId if isinstance(info.busId, str) else info.busId.decode()


def _render_nodes(bus_id: str | None) -> Iterator[str]:
    """Yield the device files for graphics of the card with this PCI address."""
    if bus_id is None:
        return
    domain, _, rest = bus_id.lower().partition(":")
    folder = _PCI_DEVICES / f"{domain[-4:]}:{rest}" / "drm"  # NVML writes the domain with eight digits
    with suppress(OSError):
        yield from (f"{_DEV}/dri/{node.name}" for node in folder.iterdir())


def files_of_mig(minor: int, gpu_instance: int, compute_instance: int) -> tuple[str, ...] | None:
    """Return the device files of a MIG device, or None if the driver does not list them.

    ``minor``: minor number of the card.
    ``gpu_instance``, ``compute_instance``: ids of the instances on that card.
    """
    try:
        lines = _MIG_MINORS.read_text().splitlines()
    except OSError:
        return None
    minors = dict(line.rsplit(maxsplit=1) for line in lines if line.strip())
    instance = f"gpu{minor}/gi{gpu_instance}"
    wanted = (f"{instance}/access", f"{instance}/ci{compute_instance}/access")
    if not all(name in minors for name in wanted):
        return None
    caps = (f"{_DEV}/nvidia-caps/nvidia-cap{minors[name]}" for name in wanted)
    return (f"{_DEV}/nvidia{minor}", *caps)


def mps_pipes(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of a running MPS daemon that CUDA would use, or None."""
    folder = Path(environ.get(_PIPES_VARIABLE) or _PIPES)
    try:
        if not (folder / _MPS_CONTROL).exists():
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
