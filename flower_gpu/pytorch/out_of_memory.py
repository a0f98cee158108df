"""Exceptions for want of GPU memory: PyTorch's, raw ones of CUDA, and those of other frameworks.

Imports none of them: a worker whose task uses JAX need not load PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# What libraries say that ask CUDA for memory without PyTorch's allocator, or are other frameworks.
_OUT_OF_MEMORY: Final = re.compile(
    r"CUDA out of memory|CUDA(?: driver)? error: out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
    r"|Cuda failure \S* ?'out of memory'",
    re.IGNORECASE,
)
_JAX = ("XlaRuntimeError", "JaxRuntimeError")
_REQUESTED = re.compile(r"allocat(?:e|ing)\s+([\d.,]*\d)\s*(bytes|B|[KMGT]iB)\b")
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DEVICE = re.compile(r"\bGPU (\d+) has a total capacity")


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """Return what in a chain of exceptions says that a GPU's memory was not enough; None: nothing does."""
    return next((link for link in _chain(error) if _says_out_of_memory(link)), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception, or one that it was raised from, is for want of GPU memory.

    Besides PyTorch's own these are raw errors of CUDA and its libraries, and those of JAX, TensorFlow, CuPy.
    For want of main memory is another thing.
    """
    return out_of_memory_in(error) is not None


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

    Parameters
    ----------
    reserved : int or None
        Bytes that the allocator has.
    requested : int or None
        Bytes that it needed then.
    cap : int
        Bytes that it may have.
    free : int or None
        Bytes that nobody uses of the GPU.

    Returns
    -------
    str
        ``"over_cap"``: the GPU has room, the lease does not. ``"card_full"``: the lease has room, the GPU
        does not. ``"unclear"``: neither or both, as with fragmented memory.
    """
    if reserved is None or requested is None or free is None:
        return "unclear"
    over = reserved + requested > cap
    full = free < requested
    if over == full:
        return "unclear"
    return "over_cap" if over else "card_full"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, members of groups too."""
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
    if any(_is_of(error, library, "OutOfMemoryError") for library in ("torch", "cupy")):
        return True
    text = _text(error)
    name = type(error).__name__
    if name in _JAX:
        return "RESOURCE_EXHAUSTED" in text and "memory" in text.lower()
    if _is_of(error, "tensorflow", "ResourceExhaustedError"):
        return "OOM when allocating" in text and "device:CPU" not in text
    # torch.AcceleratorError is a RuntimeError; so is what a DataLoader makes of its workers' errors when it
    # cannot raise one of the same type. Numba and PyCUDA have errors of their own.
    is_cuda = isinstance(error, RuntimeError) or "CUDA_ERROR_OUT_OF_MEMORY" in text
    return is_cuda and isinstance(error, Exception) and _OUT_OF_MEMORY.search(text) is not None


def _is_of(error: BaseException, library: str, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == library for kind in type(error).__mro__
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ failed
        return ""
