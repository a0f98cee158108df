"""NVIDIA's management library (NVML), called through nvidia-ml-py. No other module calls it.

A failed call raises :class:`QueryError` with the reason in words. The library is imported by the first
:class:`NVMLSession`, not by this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, NewType, TypeVar

from flower_gpu.printable import printable

T = TypeVar("T")

#: A GPU or MIG device, valid in one session of one process.
Handle = NewType("Handle", object)

_LIBRARY: Final = "libnvidia-ml.so.1"
#: Start of the reason if no driver is installed.
NO_DRIVER: Final = "no NVIDIA driver here"

# Codes of nvml.h (https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html).
_UNINITIALIZED: Final = 1
_INVALID_ARGUMENT: Final = 2
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_NOT_FOUND: Final = 6
_LIBRARY_NOT_FOUND: Final = 12
_FUNCTION_NOT_FOUND: Final = 13
_ARGUMENT_VERSION_MISMATCH: Final = 25

#: Codes of drivers without a function, or without it for this GPU.
_ABSENT: Final = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH})

_START_ERRORS: Final = {
    _NO_PERMISSION: "this account may not use the NVIDIA driver: it needs access to /dev/nvidiactl and "
    "/dev/nvidia0, /dev/nvidia1, ... (groups video or render on many hosts)",
    9: "the NVIDIA driver is not loaded. Run nvidia-smi, which says more; in a container, start that with "
    "access to the GPUs (docker run --gpus all)",
    _FUNCTION_NOT_FOUND: "the NVIDIA driver is too old for nvidia-ml-py, its library lacks the function that "
    "starts it: update the driver",
    18: "the NVIDIA driver's library and its kernel module are of different versions, as after an update: "
    "restart the machine, or load the new module",
    28: "the NVIDIA driver finds no GPU",
}

_GPU_ERRORS: Final = {
    _NO_PERMISSION: "this account may not use it: it needs access to its device file /dev/nvidia<number>",
    8: "its external power cables are not all attached",
    11: "the driver gets no interrupts from it: see the kernel's log (dmesg)",
    15: "it is lost: the driver can no longer reach it. See the kernel's log (dmesg), and restart the "
    "machine",
    16: "it has to be reset before it can be used again: nvidia-smi --gpu-reset, or restart the machine",
}


_LIMIT_ERRORS: Final = {
    _NO_PERMISSION: "this account may not set limits of control groups: root may",
    _NOT_SUPPORTED: "its driver sets no limits on this GPU",
    _FUNCTION_NOT_FOUND: "drivers before 615 do not support limits of control groups",
}


#: Compute modes as ``nvidia-smi -c`` names them: any number of processes, one thread's, none, or one process.
COMPUTE_MODES: Final = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


class QueryError(Exception):
    """NVML cannot answer. The text gives the reason and a way out.

    ``code``: error code of NVML, or None if NVML was not called.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code

    @property
    def ends_session(self) -> bool:
        """True if other code has shut NVML down. A new session may work."""
        return self.code == _UNINITIALIZED

    @property
    def is_absence(self) -> bool:
        """True if the driver lacks the function, or the GPU lacks the feature."""
        return self.code in _ABSENT


#: Memory of a GPU in bytes: total, used, free and reserved by the driver. Used and free exclude the reserved
#: part. With drivers before 510, used includes the reserved part, and the last item is None.
Memory = tuple[int, int, int, int | None]


class NVMLSession:
    """NVML from ``nvmlInit`` to ``nvmlShutdown``, for this process.

    The library counts its initializations, so sessions of other code in this process are not affected. Other
    code ends this session only if it shuts NVML down more often than it has started it. A fork needs a
    session of its own.

    Raises QueryError if NVML cannot be started: without a driver, a library or permission.
    """

    def __init__(self) -> None:
        self._nvml = _pynvml()
        self._missing: set[str] = set()
        try:
            self._nvml.nvmlInit()
        except self._errors() as error:
            raise _start_error(_code(error), error) from None

    def close(self) -> None:
        """Shut NVML down, which closes ``/dev/nvidiactl`` and the GPUs' files."""
        with suppress(*self._errors()):
            self._nvml.nvmlShutdown()

    def driver_version(self) -> str | None:
        """Return the driver's version as ``nvidia-smi`` shows it, or None if unknown."""
        return self._optional(str, "nvmlSystemGetDriverVersion")

    def cuda_version(self) -> tuple[int, int] | None:
        """Return the newest CUDA that the driver supports, such as ``(12, 4)``, or None if unknown."""
        number = self._optional(int, "nvmlSystemGetCudaDriverVersion_v2") or 0
        return (number // 1000, number % 1000 // 10) if number > 0 else None

    def count(self) -> int:
        """Return the number of GPUs (cards, not MIG devices), including broken ones."""
        return int(self._call("nvmlDeviceGetCount"))

    def card(self, index: int) -> Handle:
        """Return the GPU with this index of ``nvidia-smi``."""
        return Handle(self._call("nvmlDeviceGetHandleByIndex", index))

    def with_uuid(self, uuid: str) -> Handle:
        """Return the GPU or MIG device with this UUID, without opening others."""
        return Handle(self._call("nvmlDeviceGetHandleByUUID", uuid))

    def uuid(self, handle: Handle) -> str:
        """Return the UUID: ``GPU-...`` or ``MIG-...``."""
        return str(self._call("nvmlDeviceGetUUID", handle))

    def name(self, handle: Handle) -> str:
        """Return the model."""
        return str(self._call("nvmlDeviceGetName", handle))

    def memory(self, handle: Handle) -> Memory | None:
        """Return the memory of a GPU, or None without figures, as for GPUs that share the host's memory."""
        with suppress(_AbsentError):
            figures = self._call_if_present("nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
            return _memory(figures, int(figures.reserved))
        with suppress(_AbsentError):
            return _memory(self._call_if_present("nvmlDeviceGetMemoryInfo", handle), None)
        return None

    def memory_limits(self, card: Handle, group: str) -> tuple[int | None, int | None, int] | None:
        """Return the soft limit, the hard limit and the use of a control group on a card, in bytes.

        A limit of None means no limit. Returns None if the driver or the card does not support limits.
        """
        kind = getattr(self._nvml, "c_nvmlGetMemoryLimits_v1_t", None)
        if kind is None:  # nvidia-ml-py before 13.615
            return None
        limits = kind(nameSpace=group.encode())
        try:
            self._call_if_present("nvmlDeviceGetMemoryLimits_v1", card, limits)
        except _AbsentError:
            return None
        hard = None if limits.hardLimit == self._nvml.NVML_DEVICE_MEMORY_LIMIT_MAX else int(limits.hardLimit)
        return int(limits.softLimit) or None, hard, int(limits.currentUsed)

    def set_memory_limits(self, card: Handle, group: str, limit_bytes: int | None) -> None:
        """Set both limits of a control group on a card, or remove them with None. Raises QueryError."""
        kind = getattr(self._nvml, "c_nvmlSetMemoryLimits_v1_t", None)
        if kind is None:
            raise QueryError("nvidia-ml-py is older than 13.615: pip install --upgrade nvidia-ml-py")
        hard = self._nvml.NVML_DEVICE_MEMORY_LIMIT_MAX if limit_bytes is None else limit_bytes
        limits = kind(nameSpace=group.encode(), softLimit=limit_bytes or 0, hardLimit=hard)
        try:
            self._call("nvmlDeviceSetMemoryLimits_v1", card, limits)
        except QueryError as problem:
            text = _LIMIT_ERRORS.get(problem.code or 0)
            raise problem if text is None else QueryError(text, problem.code) from None

    def utilization_percent(self, handle: Handle) -> int | None:
        """Return the share of the last sample period with a running kernel, or None if unknown (MIG)."""
        return self._optional(lambda rates: int(rates.gpu), "nvmlDeviceGetUtilizationRates", handle)

    def temperature_c(self, handle: Handle) -> int | None:
        """Return the temperature in degrees Celsius, or None if unknown."""
        return self._optional(int, "nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)

    def persistence_mode(self, handle: Handle) -> bool | None:
        """Return True if the driver stays loaded without clients, or None if unknown."""
        return self._optional(bool, "nvmlDeviceGetPersistenceMode", handle)

    def compute_mode(self, card: Handle) -> str | None:
        """Return one of :data:`COMPUTE_MODES`, or None if unknown."""
        return self._optional(COMPUTE_MODES.get, "nvmlDeviceGetComputeMode", card)

    def minor_number(self, card: Handle) -> int | None:
        """Return the number in the name of a card's device file, or None if unknown."""
        return self._optional(int, "nvmlDeviceGetMinorNumber", card)

    def bus_id(self, card: Handle) -> str | None:
        """Return the PCI address of a card, such as ``"00000000:3B:00.0"``, or None if unknown."""
        return self._optional(_bus_id, "nvmlDeviceGetPciInfo", card)

    def mig_instances(self, handle: Handle) -> tuple[int, int] | None:
        """Return the ids of a MIG device's GPU instance and compute instance, or None if unknown."""
        ids = [self._optional(int, f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute")]
        return None if None in ids else (ids[0], ids[1])  # type: ignore[return-value]

    def processes(self, handle: Handle) -> list[tuple[int, int | None, bool]] | None:
        """Return the process id, the memory in bytes and "computes" of each process on a GPU.

        The memory is None if unknown. "computes" is False for processes that only draw. Returns None if the
        list is refused. Process ids may belong to another namespace (containers), or to ended processes.
        """
        by_pid: dict[int, tuple[int | None, bool]] = {}
        # MPSCompute lists the clients of an MPS server.
        for kind in ("Compute", "MPSCompute", "Graphics"):
            try:
                processes = self._running(kind, handle)
            except QueryError as problem:
                _raise_if_session_ended(problem)
                processes = None
            if processes is None and kind == "Compute":
                return None
            for process in processes or ():
                # A process that computes and draws is in two lists, with its total memory in both.
                known_bytes, computes = by_pid.get(int(process.pid), (None, kind != "Graphics"))
                used = process.usedGpuMemory
                used_bytes = known_bytes if used is None else max(int(used), known_bytes or 0)
                by_pid[int(process.pid)] = used_bytes, computes
        return [(pid, *by_pid[pid]) for pid in sorted(by_pid)]

    def mig_devices(self, handle: Handle) -> list[Handle | QueryError] | None:
        """Return the MIG devices of a card, with an error for each inaccessible one. None if MIG mode is off.

        Raises QueryError. If the card or its driver does not support MIG, ``is_absence`` is True.
        """
        current, _ = self._call("nvmlDeviceGetMigMode", handle)
        if not current:
            return None
        devices: list[Handle | QueryError] = []
        for number in range(int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))):
            try:
                devices.append(Handle(self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)))
            except QueryError as problem:
                _raise_if_session_ended(problem)
                if problem.code not in (_NOT_FOUND, _INVALID_ARGUMENT):  # no device has this number
                    devices.append(problem)
        return devices

    def _running(self, kind: str, handle: Handle) -> list[Any] | None:
        # Functions with a version. Those without one raise a different error with older drivers.
        for version in ("v3", "v2"):
            with suppress(_AbsentError):
                return list(self._call_if_present(f"nvmlDeviceGet{kind}RunningProcesses_{version}", handle))
        return None

    def process_name(self, pid: int) -> str:
        """Return the program of a process as printable text, or an empty text if unknown."""
        with suppress(UnicodeDecodeError):  # a path may consist of any bytes
            return printable(self._optional(str, "nvmlSystemGetProcessName", pid) or "")
        return ""

    def _optional(self, convert: Callable[[Any], T], function: str, *args: Any) -> T | None:
        """Return the converted answer of a function, or None if the driver does not give one."""
        try:
            return convert(self._call(function, *args))
        except QueryError as problem:
            _raise_if_session_ended(problem)
            return None

    def _call_if_present(self, function: str, *args: Any) -> Any:
        """Call a function that older drivers lack. Missing functions are remembered.

        Raises _AbsentError if the function is missing.
        """
        key = f"{function}/{len(args)}"
        if key in self._missing:
            raise _AbsentError
        try:
            return self._call(function, *args)
        except QueryError as problem:
            if problem.code == _FUNCTION_NOT_FOUND:
                self._missing.add(key)
            if problem.is_absence:
                raise _AbsentError from None
            raise

    def _call(self, function: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*args)
        except self._errors() as error:
            raise _gpu_error(_code(error), error) from None

    def _errors(self) -> tuple[type[Exception], ...]:
        # A function missing from the library raises NVMLLibraryMismatchError. A function missing from
        # nvidia-ml-py raises AttributeError.
        return self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError, AttributeError


class _AbsentError(Exception):
    """The driver lacks the function, or the function for this GPU."""


def _pynvml() -> ModuleType:
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise QueryError(f"nvidia-ml-py cannot be imported ({error}): pip install nvidia-ml-py") from None
    return pynvml  # type: ignore[no-any-return]


def _bus_id(info: Any) -> str:
    return info.busId if isinstance(info.busId, str) else info.busId.decode()


def _memory(figures: Any, reserved_bytes: int | None) -> Memory | None:
    if figures.total <= 0:  # a wrong answer of the driver
        return None
    return int(figures.total), int(figures.used), int(figures.free), reserved_bytes


def _raise_if_session_ended(problem: QueryError) -> None:
    """Raise the error if NVML was shut down. Other errors mean that one figure is missing."""
    if problem.ends_session:
        raise problem


def _code(error: Exception) -> int:
    return int(getattr(error, "value", _FUNCTION_NOT_FOUND))


def _gpu_error(code: int, error: Exception) -> QueryError:
    return QueryError(_GPU_ERRORS.get(code) or f"the driver answers {str(error)!r} (NVML code {code})", code)


def _start_error(code: int, error: Exception) -> QueryError:
    if code == _LIBRARY_NOT_FOUND:
        why = _why_not_loaded()
        is_missing = "No such file" in why
        reason = (
            f"{NO_DRIVER}: {_LIBRARY} is missing" if is_missing else f"{_LIBRARY} cannot be loaded: {why}"
        )
        return QueryError(
            f"{reason}. It comes with the driver; in a container, start it with access to the GPUs "
            "(docker run --gpus all)",
            code,
        )
    text = _START_ERRORS.get(code) or f"the NVIDIA driver answers {str(error)!r} (NVML code {code})"
    return QueryError(text, code)


def _why_not_loaded() -> str:
    """Return the loader's reason: nvidia-ml-py does not tell a missing library from a broken one."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return str(error)
    return "it could be a moment later: try again"
