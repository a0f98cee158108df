"""Recognises exceptions of missing GPU memory, of a missing GPU, or of faults: of frameworks, and of CUDA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flower_gpu.errors import WorkerTaskError
from flower_gpu.frameworks import ALL
from flower_gpu.frameworks.framework import is_of

# The texts of libraries that ask CUDA itself for memory.
_OUT_OF_MEMORY: Final = re.compile(
    r"CUDA out of memory|CUDA(?: driver)? error: out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
    r"|Cuda failure \S* ?'out of memory'",
    re.IGNORECASE,
)
# cudaErrorDevicesUnavailable (46): one process at a time may compute there, and another one does.
_BUSY: Final = re.compile(
    r"CUDA-capable devices?\S* (?:is|are|is/are) busy or unavailable|cudaErrorDevicesUnavailable"
    r"|CUDA_ERROR_DEVICE_UNAVAILABLE"
)
# After these a process can do nothing more with CUDA. With MPS no other client of the server can either.
_FAULT: Final = re.compile(
    r"illegal memory access|unspecified launch failure|device-side assert|misaligned address"
    r"|illegal instruction|invalid program counter|hardware stack error|uncorrectable ECC"
    r"|(?:CUDA_ERROR|cudaError)_?(?:MPS|ILLEGAL|LAUNCH_?FAIL|ASSERT|MISALIGNED|HARDWARE_?STACK|INVALID_?PC|ECC)"
    r"|\bMPS (?:client|server)\b",
    re.IGNORECASE,
)
_REQUESTED = re.compile(r"allocat(?:e|ing)\s+([\d.,]*\d)\s*(bytes|B|[KMGT]iB)\b")
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DEVICE = re.compile(r"\bGPU (\d+) has a total capacity")


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """Return the exception of a chain that reports too little memory of a GPU (not of the host), or None.

    None where nothing does. These are errors of frameworks, and raw errors of CUDA, its libraries, CuPy and
    Numba.
    """
    return next((link for link in _chain(error) if _says_out_of_memory(link)), None)


def says_device_is_busy(error: BaseException) -> bool:
    """Tell whether something in a chain of exceptions says that CUDA was refused the GPU."""
    return any(_BUSY.search(_text(link)) for link in _chain(error))


def says_fault(error: BaseException) -> bool:
    """Tell whether something in a chain of exceptions says that a GPU, or its MPS server, had a fault."""
    return any(_FAULT.search(_text(link)) for link in _chain(error))


def requested_bytes(error: BaseException) -> int | None:
    """Return how much memory was asked for, as far as the text of an out-of-memory error says."""
    for link in _chain(error):
        if found := _REQUESTED.search(_text(link)):
            return int(float(found[1].replace(",", "")) * _UNITS[found[2]])
    return None


def device_index(error: BaseException) -> int | None:
    """Return the GPU that an out-of-memory error of PyTorch is about."""
    for link in _chain(error):
        if found := _DEVICE.search(_text(link)):
            return int(found[1])
    return None


def classify(reserved: int | None, requested: int | None, cap: int, free: int | None) -> str:
    """Tell why memory was not enough, by numbers: PyTorch's text says "allowed" whenever there is a cap.

    ``"over_cap"``: the GPU has room (``free``), the lease (``cap``) does not. ``"card_full"``: the lease has
    room, the GPU does not. ``"unclear"``: neither or both, as with fragmented memory. All are bytes.
    """
    if reserved is None or requested is None or free is None:
        return "unclear"
    over = reserved + requested > cap
    full = free < requested
    if over == full:
        return "unclear"
    return "over_cap" if over else "card_full"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, members of groups too."""
    waiting, seen = [error], set()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
        if link.__cause__ is not None:
            waiting.append(link.__cause__)


def _says_out_of_memory(error: BaseException) -> bool:
    text = _text(error)
    if isinstance(error, WorkerTaskError):
        error = _like_that_of(error)
    if any(framework.says_out_of_memory(error, text) for framework in ALL):
        return True
    if is_of(error, "cupy", "OutOfMemoryError"):
        return True
    # torch.AcceleratorError is a RuntimeError; so is what a DataLoader makes of its workers' errors when it
    # cannot raise one of the same type. Numba and PyCUDA have errors of their own.
    is_cuda = isinstance(error, RuntimeError) or "CUDA_ERROR_OUT_OF_MEMORY" in text
    return is_cuda and isinstance(error, Exception) and _OUT_OF_MEMORY.search(text) is not None


def _like_that_of(error: WorkerTaskError) -> BaseException:
    """Return an exception of a class with the name that a worker told: the class is not imported here."""
    module, _, name = error.error_type.rpartition(".")
    base = Exception if module == "builtins" else RuntimeError
    like: BaseException = type(name, (base,), {"__module__": module})()
    return like


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ failed
        return ""
