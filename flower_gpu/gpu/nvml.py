"""NVIDIA's management library (NVML) through nvidia-ml-py: the only file that knows it.

What it cannot answer is a :class:`QueryError` with a reason in words. Nothing is imported or loaded before
the first :class:`NVMLSession`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, NewType, TypeVar

from flower_gpu.printable import printable

T = TypeVar("T")

#: A GPU or MIG device as NVML names it to one session. Worthless in another one, or in another process.
Handle = NewType("Handle", object)

_LIBRARY: Final = "libnvidia-ml.so.1"
#: How the reason begins where nobody has installed a driver.
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

#: What a driver answers that does not have a function, or not for this GPU.
_NOT_TOLD: Final = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH})

_AT_START: Final = {
    _NO_PERMISSION: "this account may not use the NVIDIA driver: it needs access to /dev/nvidiactl and "
    "/dev/nvidia0, /dev/nvidia1, ... (groups video or render on many hosts)",
    9: "the NVIDIA driver is not loaded. Run nvidia-smi: it tells more; in a container, start that with "
    "access to the GPUs (docker run --gpus all)",
    _FUNCTION_NOT_FOUND: "the NVIDIA driver is too old for nvidia-ml-py, its library lacks the function that "
    "starts it: update the driver",
    18: "the NVIDIA driver's library and its kernel module are of different versions, as after an update: "
    "restart the machine, or load the new module",
    28: "the NVIDIA driver finds no GPU",
}

_OF_A_GPU: Final = {
    _NO_PERMISSION: "this account may not use it: it needs access to its device file /dev/nvidia<number>",
    8: "its external power cables are not all attached",
    11: "the driver gets no interrupts from it: see the kernel's log (dmesg)",
    15: "it is lost: the driver cannot reach it any more. See the kernel's log (dmesg), and restart the "
    "machine",
    16: "it has to be reset before it can be used again: nvidia-smi --gpu-reset, or restart the machine",
}


_OF_A_LIMIT: Final = {
    _NO_PERMISSION: "this account may not set limits of control groups: root may",
    _NOT_SUPPORTED: "its driver sets no limits on this GPU",
    _FUNCTION_NOT_FOUND: "a driver before 615 knows no limits of control groups",
}


#: How many processes may compute on a card at a time: any, one, or none. As ``nvidia-smi -c`` takes them.
COMPUTE_MODES: Final = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


class QueryError(Exception):
    """NVML cannot answer. The text has the reason, and a way out.

    ``code``: NVML's own code; None where it was not even asked.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code

    @property
    def ends_session(self) -> bool:
        """Whether NVML was shut down under the session: a new one may work."""
        return self.code == _UNINITIALIZED

    @property
    def is_absence(self) -> bool:
        """Whether a function, or a feature of this GPU, does not exist."""
        return self.code in _NOT_TOLD


#: Memory of a GPU in bytes: total, used, free, and what the driver keeps, which is in none of used and free.
#: Drivers before 510 tell only the sum of used and kept: then that is used, and the last one is None.
Memory = tuple[int, int, int, int | None]


class NVMLSession:
    """NVML from ``nvmlInit`` to ``nvmlShutdown``, for this process.

    The library counts who has initialised it, so a session takes nothing from others that use it here, and
    theirs nothing from it as long as they shut down no more than they started. It is good in the process that
    made it only: a fork must make its own.

    Raises QueryError if there is no driver, no library, no permission, or another reason why it does not
    start.
    """

    def __init__(self) -> None:
        self._nvml = _pynvml()
        self._missing: set[str] = set()
        try:
            self._nvml.nvmlInit()
        except self._errors() as error:
            raise _at_start(_code(error), error) from None

    def close(self) -> None:
        """Shut NVML down, which closes ``/dev/nvidiactl`` and the GPUs' files."""
        with suppress(*self._errors()):
            self._nvml.nvmlShutdown()

    def driver_version(self) -> str | None:
        """Return the driver's version, as ``nvidia-smi`` shows it; None where it is not told."""
        return self._told(str, "nvmlSystemGetDriverVersion")

    def cuda_version(self) -> tuple[int, int] | None:
        """Return the newest CUDA that the driver supports, such as ``(12, 4)``; None where it is not told."""
        number = self._told(int, "nvmlSystemGetCudaDriverVersion_v2") or 0
        return (number // 1000, number % 1000 // 10) if number > 0 else None

    def count(self) -> int:
        """Count the host's GPUs (cards, not MIG devices), broken ones included."""
        return int(self._call("nvmlDeviceGetCount"))

    def card(self, index: int) -> Handle:
        """Return the GPU with this number, as ``nvidia-smi`` counts them."""
        return Handle(self._call("nvmlDeviceGetHandleByIndex", index))

    def with_uuid(self, uuid: str) -> Handle:
        """Return the GPU or MIG device with this UUID. No other one need be opened for that."""
        return Handle(self._call("nvmlDeviceGetHandleByUUID", uuid))

    def uuid(self, handle: Handle) -> str:
        """Return ``GPU-...`` or ``MIG-...``."""
        return str(self._call("nvmlDeviceGetUUID", handle))

    def name(self, handle: Handle) -> str:
        """Return the model."""
        return str(self._call("nvmlDeviceGetName", handle))

    def memory(self, handle: Handle) -> Memory | None:
        """Return the memory figures; None for a GPU whose driver tells none (those that share the host's)."""
        with suppress(_AbsentError):
            now = self._call_if_there("nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
            return _memory(now, int(now.reserved))
        with suppress(_AbsentError):
            return _memory(self._call_if_there("nvmlDeviceGetMemoryInfo", handle), None)
        return None

    def memory_limits(self, card: Handle, group: str) -> tuple[int | None, int | None, int] | None:
        """Return the soft and the hard limit of a control group on a card, and what it uses, in bytes.

        A limit is None where there is none. None: this driver, or this card, knows no such limits.
        """
        kind = getattr(self._nvml, "c_nvmlGetMemoryLimits_v1_t", None)
        if kind is None:  # nvidia-ml-py before 13.615
            return None
        told = kind(nameSpace=group.encode())
        try:
            self._call_if_there("nvmlDeviceGetMemoryLimits_v1", card, told)
        except _AbsentError:
            return None
        hard = None if told.hardLimit == self._nvml.NVML_DEVICE_MEMORY_LIMIT_MAX else int(told.hardLimit)
        return int(told.softLimit) or None, hard, int(told.currentUsed)

    def set_memory_limits(self, card: Handle, group: str, limit_bytes: int | None) -> None:
        """Set both limits of a control group on a card; None takes them away. Raises QueryError."""
        kind = getattr(self._nvml, "c_nvmlSetMemoryLimits_v1_t", None)
        if kind is None:
            raise QueryError("nvidia-ml-py is older than 13.615: pip install --upgrade nvidia-ml-py")
        hard = self._nvml.NVML_DEVICE_MEMORY_LIMIT_MAX if limit_bytes is None else limit_bytes
        wanted = kind(nameSpace=group.encode(), softLimit=limit_bytes or 0, hardLimit=hard)
        try:
            self._call("nvmlDeviceSetMemoryLimits_v1", card, wanted)
        except QueryError as problem:
            text = _OF_A_LIMIT.get(problem.code or 0)
            raise problem if text is None else QueryError(text, problem.code) from None

    def utilization_percent(self, handle: Handle) -> int | None:
        """Return the share of the last moments with a running kernel; None without a figure (MIG)."""
        return self._told(lambda rates: int(rates.gpu), "nvmlDeviceGetUtilizationRates", handle)

    def temperature_c(self, handle: Handle) -> int | None:
        """Return how warm it is, in degrees Celsius; None where that is not told."""
        return self._told(int, "nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)

    def persistence_mode(self, handle: Handle) -> bool | None:
        """Tell whether the driver keeps a GPU ready while nobody uses it; None where that is not told."""
        return self._told(bool, "nvmlDeviceGetPersistenceMode", handle)

    def compute_mode(self, card: Handle) -> str | None:
        """Return how many processes may compute on a card: one of :data:`COMPUTE_MODES`; None: not told."""
        return self._told(COMPUTE_MODES.get, "nvmlDeviceGetComputeMode", card)

    def minor_number(self, card: Handle) -> int | None:
        """Return the number in the name of a card's device file; None where it is not told."""
        return self._told(int, "nvmlDeviceGetMinorNumber", card)

    def bus_id(self, card: Handle) -> str | None:
        """Return where a card is, such as ``"00000000:3B:00.0"``; None where it is not told."""
        return self._told(_bus_id, "nvmlDeviceGetPciInfo", card)

    def mig_instances(self, handle: Handle) -> tuple[int, int] | None:
        """Return the ids of a MIG device's GPU instance and compute instance; None: not told."""
        found = [self._told(int, f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute")]
        return None if None in found else (found[0], found[1])  # type: ignore[return-value]

    def processes(self, handle: Handle) -> list[tuple[int, int | None, bool]] | None:
        """Return of each process pid, memory in bytes (None: not told), and whether it does more than draw.

        None where that is refused. Numbers of processes may be those of another namespace (containers), and
        of processes that are gone.
        """
        found: dict[int, tuple[int | None, bool]] = {}
        for kind in ("Compute", "MPSCompute", "Graphics"):  # the second: clients of an MPS server
            try:
                listed = self._running(kind, handle)
            except QueryError as problem:
                _unless_over(problem)
                listed = None
            if listed is None and kind == "Compute":
                return None
            for process in listed or ():
                # One that computes and draws is in two lists, with all its memory in each.
                known, computes = found.get(int(process.pid), (None, kind != "Graphics"))
                told = process.usedGpuMemory
                found[int(process.pid)] = known if told is None else max(int(told), known or 0), computes
        return [(pid, *found[pid]) for pid in sorted(found)]

    def mig_devices(self, handle: Handle) -> list[Handle | QueryError] | None:
        """Return the MIG devices of a card, or why one cannot be had; None where MIG mode is off.

        Raises QueryError: also with ``is_absence``: this card, or its driver, knows no MIG, and never will.
        """
        current, _ = self._call("nvmlDeviceGetMigMode", handle)
        if not current:
            return None
        found: list[Handle | QueryError] = []
        for number in range(int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))):
            try:
                found.append(Handle(self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)))
            except QueryError as problem:
                _unless_over(problem)
                if problem.code not in (_NOT_FOUND, _INVALID_ARGUMENT):  # there need not be one
                    found.append(problem)
        return found

    def _running(self, kind: str, handle: Handle) -> list[Any] | None:
        # Asked for by version: those without one raise another kind of error where the driver is older.
        for version in ("v3", "v2"):
            with suppress(_AbsentError):
                return list(self._call_if_there(f"nvmlDeviceGet{kind}RunningProcesses_{version}", handle))
        return None

    def process_name(self, pid: int) -> str:
        """Return the program of a process, for a terminal; empty where it is not told."""
        with suppress(UnicodeDecodeError):  # a name may be any bytes
            return printable(self._told(str, "nvmlSystemGetProcessName", pid) or "")
        return ""

    def _told(self, make: Callable[[Any], T], function: str, *args: Any) -> T | None:
        """Return what an answer is made into; None where it is not told."""
        try:
            return make(self._call(function, *args))
        except QueryError as problem:
            _unless_over(problem)
            return None

    def _call_if_there(self, function: str, *args: Any) -> Any:
        """Call a function that older drivers lack; remember that, since a loaded library gets no new ones."""
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
            raise _of_a_gpu(_code(error), error) from None

    def _errors(self) -> tuple[type[Exception], ...]:
        # What the library lacks raises one that is no NVMLError; what nvidia-ml-py lacks, the last one.
        return self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError, AttributeError


class _AbsentError(Exception):
    """Neither this function nor an answer from it exists here."""


def _pynvml() -> ModuleType:
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise QueryError(f"nvidia-ml-py cannot be imported ({error}): pip install nvidia-ml-py") from None
    return pynvml  # type: ignore[no-any-return]


def _bus_id(found: Any) -> str:
    return found.busId if isinstance(found.busId, str) else found.busId.decode()


def _memory(now: Any, reserved_bytes: int | None) -> Memory | None:
    # A driver that knows of no memory at all cannot be right.
    return (int(now.total), int(now.used), int(now.free), reserved_bytes) if now.total > 0 else None


def _unless_over(problem: QueryError) -> None:
    """Ignore a missing figure, unless NVML as a whole fails."""
    if problem.ends_session:
        raise problem


def _code(error: Exception) -> int:
    return int(getattr(error, "value", _FUNCTION_NOT_FOUND))


def _of_a_gpu(code: int, error: Exception) -> QueryError:
    return QueryError(_OF_A_GPU.get(code) or f"the driver answers {str(error)!r} (NVML code {code})", code)


def _at_start(code: int, error: Exception) -> QueryError:
    if code == _LIBRARY_NOT_FOUND:
        why = _why_not_loaded()
        is_missing = "No such file" in why
        found = f"{NO_DRIVER}: {_LIBRARY} is missing" if is_missing else f"{_LIBRARY} cannot be loaded: {why}"
        return QueryError(
            f"{found}. It comes with the driver; in a container, start it with access to the GPUs "
            "(docker run --gpus all)",
            code,
        )
    text = _AT_START.get(code) or f"the NVIDIA driver answers {str(error)!r} (NVML code {code})"
    return QueryError(text, code)


def _why_not_loaded() -> str:
    """Ask the loader once more: nvidia-ml-py says the same for a missing library and a broken one."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return str(error)
    return "it could be a moment later: try again"
