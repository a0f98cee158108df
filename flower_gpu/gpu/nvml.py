"""NVIDIA's management library (NVML), called through nvidia-ml-py. No other module calls it.

A failed call raises :class:`.QueryError` with the reason in words. The library is imported by the first
:class:`NVML`, not by this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, TypeVar

from flower_gpu.gpu.gpus import QueryError

T = TypeVar("T")

_LIBRARY: Final = "libnvidia-ml.so.1"
#: Start of the reason if no driver is installed.
NO_DRIVER: Final = "no NVIDIA driver here"

# Codes of nvml.h (https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html).
_UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
_LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
_ARGUMENT_VERSION_MISMATCH: Final = 25

#: Codes of drivers without a function, or without it for this GPU.
_ABSENT: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH})

_START_ERRORS: Final = {
    NO_PERMISSION: "this account may not use the NVIDIA driver: it needs access to /dev/nvidiactl and "
    "/dev/nvidia0, /dev/nvidia1, ... (groups video or render on many hosts)",
    9: "the NVIDIA driver is not loaded. Run nvidia-smi, which says more; in a container, start that with "
    "access to the GPUs (docker run --gpus all)",
    FUNCTION_NOT_FOUND: "the NVIDIA driver is too old for nvidia-ml-py, its library lacks the function that "
    "starts it: update the driver",
    18: "the NVIDIA driver's library and its kernel module are of different versions, as after an update: "
    "restart the machine, or load the new module",
    28: "the NVIDIA driver finds no GPU",
}

_GPU_ERRORS: Final = {
    NO_PERMISSION: "this account may not use it: it needs access to its device file /dev/nvidia<number>",
    8: "its external power cables are not all attached",
    11: "the driver gets no interrupts from it: see the kernel's log (dmesg)",
    15: "it is lost: the driver can no longer reach it. See the kernel's log (dmesg), and restart the "
    "machine",
    16: "it has to be reset before it can be used again: nvidia-smi --gpu-reset, or restart the machine",
}


class NVMLError(QueryError):
    """NVML cannot answer.

    ``code``: error code of NVML.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, ends_session=code == _UNINITIALIZED)
        self.code = code


class AbsentError(NVMLError):
    """The driver lacks the function, or the GPU lacks the feature."""


class NVML:
    """NVML from ``nvmlInit`` to ``nvmlShutdown``, for this process.

    The library counts its initializations, so other users of it in this process are not affected. Other code
    ends this use only if it shuts NVML down more often than it has started it. A fork has to start it again.

    Raises QueryError if NVML cannot be started: without a driver, a library or permission.
    """

    def __init__(self) -> None:
        self.names = _pynvml()  # constants and structures
        self._missing: dict[str, str] = {}  # texts of errors, by function that the library lacks
        try:
            self.names.nvmlInit()
        except self._errors() as error:
            raise _start_error(_code(error), error) from None

    def close(self) -> None:
        """Shut NVML down, which closes ``/dev/nvidiactl`` and the GPUs' files."""
        with suppress(*self._errors()):
            self.names.nvmlShutdown()

    def call(self, function: str, *args: Any) -> Any:
        """Return the answer of a function. A function that the library lacks is called only once.

        Raises NVMLError: AbsentError if the driver lacks the function, or the GPU lacks the feature.
        """
        # nvidia-ml-py asks another function of the library for a newer structure as an additional argument.
        key = f"{function}/{len(args)}"
        if key in self._missing:
            raise AbsentError(self._missing[key], FUNCTION_NOT_FOUND)
        try:
            return getattr(self.names, function)(*args)
        except self._errors() as error:
            code = _code(error)
            text = _GPU_ERRORS.get(code) or f"the driver answers {str(error)!r} (NVML code {code})"
        if code == FUNCTION_NOT_FOUND:
            self._missing[key] = text
        raise (AbsentError if code in _ABSENT else NVMLError)(text, code)

    def optional(self, convert: Callable[[Any], T], function: str, *args: Any) -> T | None:
        """Return the converted answer of a function, or None if the driver does not give one."""
        try:
            return convert(self.call(function, *args))
        except QueryError as problem:
            problem.raise_if_session_ended()
            return None

    def _errors(self) -> tuple[type[Exception], ...]:
        # A function missing from the library raises NVMLLibraryMismatchError. A function missing from
        # nvidia-ml-py raises AttributeError.
        return self.names.NVMLError, self.names.NVMLLibraryMismatchError, AttributeError


def _pynvml() -> ModuleType:
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise QueryError(f"nvidia-ml-py cannot be imported ({error}): pip install nvidia-ml-py") from None
    return pynvml  # type: ignore[no-any-return]


def _code(error: Exception) -> int:
    return int(getattr(error, "value", FUNCTION_NOT_FOUND))


def _start_error(code: int, error: Exception) -> NVMLError:
    if code == _LIBRARY_NOT_FOUND:
        why = _why_not_loaded()
        is_missing = "No such file" in why
        reason = (
            f"{NO_DRIVER}: {_LIBRARY} is missing" if is_missing else f"{_LIBRARY} cannot be loaded: {why}"
        )
        return NVMLError(
            f"{reason}. It comes with the driver; in a container, start it with access to the GPUs "
            "(docker run --gpus all)",
            code,
        )
    text = _START_ERRORS.get(code) or f"the NVIDIA driver answers {str(error)!r} (NVML code {code})"
    return NVMLError(text, code)


def _why_not_loaded() -> str:
    """Return the loader's reason: nvidia-ml-py does not tell a missing library from a broken one."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return str(error)
    return "it could be a moment later: try again"
