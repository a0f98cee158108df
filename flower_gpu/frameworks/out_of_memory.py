"""Recognises exceptions of missing GPU memory, of a missing GPU, or of faults: of frameworks, and of CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from flower_gpu.errors import WorkerTaskError
from flower_gpu.frameworks import ALL
from flower_gpu.frameworks.framework import is_of

_ANY: Final = ""
_RUNTIME_ERROR: Final = "builtins.RuntimeError"
_MEMORY_ERROR: Final = "builtins.MemoryError"


class _Text(NamedTuple):
    """A text with which a library says that a GPU has too little memory."""

    pattern: str
    #: The class, or the module of the classes, whose exceptions count; subclasses do, too. :data:`_ANY`
    #: where the text is a name of NVIDIA's, which is in no other error.
    raised_as: str
    #: Where the library has the text, and the versions in which it was looked up.
    source: str


#: Texts of libraries that ask CUDA for memory. Those of TensorFlow and JAX are in their files of this folder.
TEXTS: Final = (
    # Also in texts of RMM, XGBoost and CuPy.
    _Text("cudaErrorMemoryAllocation", _ANY, "driver_types.h of CUDA 13.0"),
    # Also in texts of Numba and PyCUDA.
    _Text("CUDA_ERROR_OUT_OF_MEMORY", _ANY, "cuda.h of CUDA 13.0"),
    _Text("(?:CUBLAS|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED", _ANY, "their headers of CUDA 13.0"),
    _Text("CUFFT_ALLOC_FAILED", _ANY, "cufft.h of CUDA 13.0"),
    _Text("CURAND_STATUS_ALLOCATION_FAILED", _ANY, "curand.h of cuRAND 10.4"),
    # From 9.0 on it is a name for CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, which texts have then:
    # that is main memory.
    _Text("CUDNN_STATUS_ALLOC_FAILED", _ANY, "cuDNN before 9.0"),
    _Text("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", _ANY, "cudnn_graph.h, cuDNN 9.0 to 9.24"),
    _Text("CUDA out of memory", _RUNTIME_ERROR, "c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.14"),
    # torch.AcceleratorError is a RuntimeError. So is what a DataLoader makes of an error of its processes.
    _Text(
        "CUDA(?: driver)? error: out of memory", _RUNTIME_ERROR, "c10/cuda/CUDAException.cpp of PyTorch 2.14"
    ),
    # When PyTorch words its error, it asks NVML for other processes on the GPU. Where NVML does not answer,
    # as on Jetson and MIG, that fails first.
    _Text(
        r"NVML_SUCCESS == r INTERNAL ASSERT FAILED at \S*CUDACachingAllocator",
        _RUNTIME_ERROR,
        "c10/cuda/CUDACachingAllocator.cpp of PyTorch 2, as issues have it; not in 2.14",
    ),
    _Text(r"Triton Error \[CUDA\]: out of memory", _RUNTIME_ERROR, "backends/nvidia/driver.c of Triton 3.8"),
    _Text(r"Cuda failure \S* ?'out of memory'", _RUNTIME_ERROR, "libnccl.so of NCCL 2.30"),
    _Text(r"Failed to CUDA malloc \d+ bytes", _RUNTIME_ERROR, "alloc.h of NCCL 2.1x; not in 2.30"),
    _Text("Memory allocation error on worker", "xgboost", "src/common/device_vector.cu of XGBoost of 2024"),
    _Text(r"\[CUDA\] out of memory", "lightgbm", "include/LightGBM/cuda/cuda_utils.hu of LightGBM 4"),
    _Text(
        "RMM failure at: ?.*Maximum pool size exceeded", _MEMORY_ERROR, "pool_memory_resource.hpp of RMM 24"
    ),
)
#: Texts that also mean other things, such as a dtype that a GPU cannot compute with. They count where memory
#: was short: then no workspace fitted, or not even cuBLAS's own memory.
TEXTS_IF_SHORT: Final = (
    _Text(
        "unable to find an engine to execute this computation|Unable to find a valid cuDNN algorithm",
        _RUNTIME_ERROR,
        "aten/src/ATen/native/cudnn of PyTorch 2.14",
    ),
    _Text(
        "CUBLAS_STATUS_NOT_INITIALIZED,? when calling `?cublas(?:Lt)?Create",
        _RUNTIME_ERROR,
        "aten/src/ATen/cuda/CublasHandlePool.cpp of PyTorch 2.14",
    ),
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
_REQUESTED = re.compile(
    r"(?:allocat(?:e|ing)|[Rr]equested (?:size|memory):|CUDA malloc)\s+([\d.,]*\d)\s*(bytes|B|[KMGT]i?B)\b"
)
_UNITS = {"bytes": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DEVICE = re.compile(r"\bGPU (\d+) has a total capacity")


def out_of_memory_in(
    error: BaseException, is_short: Callable[[], bool] = lambda: False
) -> BaseException | None:
    """Return the exception of a chain that reports too little memory of a GPU (not of the host), or None.

    These are errors of frameworks, and of other libraries as in :data:`TEXTS`.

    ``is_short``: returns True if memory was short: then :data:`TEXTS_IF_SHORT` count, too.
    """
    links = list(_chain(error))
    if (found := next(filter(_says_out_of_memory, links), None)) is not None:
        return found
    found = next((link for link in links if _has_one_of(TEXTS_IF_SHORT, link, _text(link))), None)
    return found if found is not None and is_short() else None


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
            unit = found[2]
            return int(float(found[1].replace(",", "")) * (_UNITS.get(unit) or _UNITS[unit[0]]))
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
    """Yield an exception and its causes, members of groups too.

    An exception that was raised while another one was handled hides that, as in a ``finally``, unless it was
    raised ``from`` something.
    """
    waiting, seen = [error], set()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
        hidden = None if link.__suppress_context__ else link.__context__
        waiting += [each for each in (link.__cause__, hidden) if each is not None]


def _says_out_of_memory(error: BaseException) -> bool:
    text = _text(error)
    if isinstance(error, WorkerTaskError):
        error = _like_that_of(error)
    if any(framework.says_out_of_memory(error, text) for framework in ALL):
        return True
    return is_of(error, "cupy", "OutOfMemoryError") or _has_one_of(TEXTS, error, text)


def _has_one_of(texts: Sequence[_Text], error: BaseException, text: str) -> bool:
    if not isinstance(error, Exception):
        return False
    classes = [f"{kind.__module__}.{kind.__name__}." for kind in type(error).__mro__]
    return any(
        re.search(each.pattern, text, re.IGNORECASE)
        and (each.raised_as == _ANY or any(name.startswith(f"{each.raised_as}.") for name in classes))
        for each in texts
    )


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
