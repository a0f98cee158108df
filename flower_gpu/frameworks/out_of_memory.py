"""Recognises exceptions of frameworks and CUDA: out of GPU memory, no GPU, and faults of a GPU."""

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
    """A library's text for too little GPU memory."""

    pattern: str
    #: Class of the exceptions, or module of their classes. Subclasses count as well. :data:`_ANY` if the text
    #: is a name of NVIDIA's, because no other error contains it.
    raised_as: str
    #: File with the text, and the versions in which it was found.
    source: str


#: Texts of libraries that allocate CUDA memory. The texts of TensorFlow and JAX are in their own files.
TEXTS: Final = (
    # Also in texts of RMM, XGBoost and CuPy.
    _Text("cudaErrorMemoryAllocation", _ANY, "driver_types.h of CUDA 13.0"),
    # Also in texts of Numba and PyCUDA.
    _Text("CUDA_ERROR_OUT_OF_MEMORY", _ANY, "cuda.h of CUDA 13.0"),
    _Text("(?:CUBLAS|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED", _ANY, "their headers of CUDA 13.0"),
    _Text("CUFFT_ALLOC_FAILED", _ANY, "cufft.h of CUDA 13.0"),
    _Text("CURAND_STATUS_ALLOCATION_FAILED", _ANY, "curand.h of cuRAND 10.4"),
    # In cuDNN 9.0 and later, this name stands for CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, an
    # error of main memory. Texts contain the long name then.
    _Text("CUDNN_STATUS_ALLOC_FAILED", _ANY, "cuDNN before 9.0"),
    _Text("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", _ANY, "cudnn_graph.h, cuDNN 9.0 to 9.24"),
    _Text("CUDA out of memory", _RUNTIME_ERROR, "c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.14"),
    # torch.AcceleratorError is a RuntimeError. A DataLoader also turns errors of its processes into one.
    _Text(
        "CUDA(?: driver)? error: out of memory", _RUNTIME_ERROR, "c10/cuda/CUDAException.cpp of PyTorch 2.14"
    ),
    # PyTorch asks NVML for other processes on the GPU to compose its error. If NVML does not answer, as on
    # Jetson and MIG, this assertion fails first.
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
#: Ambiguous texts, which also occur for other reasons such as an unsupported dtype. They count only if memory
#: was short, so that no workspace or not even cuBLAS's own memory could be allocated.
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
# cudaErrorDevicesUnavailable (46): another process uses a GPU in exclusive compute mode
_BUSY: Final = re.compile(
    r"CUDA-capable devices?\S* (?:is|are|is/are) busy or unavailable|cudaErrorDevicesUnavailable"
    r"|CUDA_ERROR_DEVICE_UNAVAILABLE"
)
# After these errors, a process can no longer use CUDA. Under MPS, neither can other clients of the server.
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
    """Return the exception in a chain that reports too little GPU memory, or None.

    Main memory does not count. The errors come from frameworks and from the libraries in :data:`TEXTS`.

    ``is_short``: returns True if GPU memory was short. Then :data:`TEXTS_IF_SHORT` count as well.
    """
    links = list(_chain(error))
    if (link := next(filter(_says_out_of_memory, links), None)) is not None:
        return link
    link = next((link for link in links if _matches(TEXTS_IF_SHORT, link, _text(link))), None)
    return link if link is not None and is_short() else None


def says_device_is_busy(error: BaseException) -> bool:
    """Return True if an exception in the chain says that the GPU refused the process."""
    return any(_BUSY.search(_text(link)) for link in _chain(error))


def says_fault(error: BaseException) -> bool:
    """Return True if an exception in the chain reports a fault of a GPU or its MPS server."""
    return any(_FAULT.search(_text(link)) for link in _chain(error))


def requested_bytes(error: BaseException) -> int | None:
    """Return the number of requested bytes in the text of an out-of-memory error, or None."""
    for link in _chain(error):
        if match := _REQUESTED.search(_text(link)):
            unit = match[2]
            return int(float(match[1].replace(",", "")) * (_UNITS.get(unit) or _UNITS[unit[0]]))
    return None


def device_index(error: BaseException) -> int | None:
    """Return the index of the GPU in the text of PyTorch's out-of-memory error, or None."""
    for link in _chain(error):
        if match := _DEVICE.search(_text(link)):
            return int(match[1])
    return None


def classify(reserved: int | None, requested: int | None, cap: int, free: int | None) -> str:
    """Return why memory was not enough, from figures in bytes. PyTorch's text blames the cap if there is one.

    Returns ``"over_cap"`` if the GPU has room (``free``) and the lease (``cap``) does not, ``"card_full"`` if
    the lease has room and the GPU does not, and ``"unclear"`` otherwise, as with fragmented memory.
    """
    if reserved is None or requested is None or free is None:
        return "unclear"
    is_over_cap = reserved + requested > cap
    is_card_full = free < requested
    if is_over_cap == is_card_full:
        return "unclear"
    return "over_cap" if is_over_cap else "card_full"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes and contexts, and the members of groups.

    The context matters, because an exception raised in a ``finally`` hides the original one.
    """
    pending, seen = [error], set()
    while pending:
        link = pending.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions
        context = None if link.__suppress_context__ else link.__context__
        pending += [error for error in (link.__cause__, context) if error is not None]


def _says_out_of_memory(error: BaseException) -> bool:
    text = _text(error)
    if isinstance(error, WorkerTaskError):
        error = _stand_in(error)
    if any(framework.says_out_of_memory(error, text) for framework in ALL):
        return True
    return is_of(error, "cupy", "OutOfMemoryError") or _matches(TEXTS, error, text)


def _matches(texts: Sequence[_Text], error: BaseException, text: str) -> bool:
    if not isinstance(error, Exception):
        return False
    classes = [f"{kind.__module__}.{kind.__name__}." for kind in type(error).__mro__]
    return any(
        re.search(known.pattern, text, re.IGNORECASE)
        and (known.raised_as == _ANY or any(name.startswith(f"{known.raised_as}.") for name in classes))
        for known in texts
    )


def _stand_in(error: WorkerTaskError) -> BaseException:
    """Return an exception with the class name of a worker's error, because its class is not imported here."""
    module, _, name = error.error_type.rpartition(".")
    base = Exception if module == "builtins" else RuntimeError
    stand_in: BaseException = type(name, (base,), {"__module__": module})()
    return stand_in


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the __str__ of the exception failed
        return ""
