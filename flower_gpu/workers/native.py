"""What native libraries of this process would do to a fork. None of them is imported here, nor CUDA."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CUDA_SUCCESS = 0
_MADV_COLLAPSE = 25  # asm-generic/mman-common.h, Linux 6.1
_HUGE_PAGE = 1 << 21  # bytes, on x86-64 and usually on arm64
_OMP_PAUSE_HARD = 2  # omp_pause_resource_t in the OpenMP 5.0 specification, section 3.2.43


def initialized_cuda_devices() -> int | None:
    """Count the GPUs this process sees, if it has initialised CUDA.

    Returns None while CUDA is untouched: then a forked child can initialise it for itself.
    """
    libcuda = _loaded_cuda()
    count = ctypes.c_int(0)
    if libcuda is None or libcuda.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return None  # CUDA_ERROR_NOT_INITIALIZED
    return count.value


def _loaded_cuda() -> ctypes.CDLL | None:
    try:
        # RTLD_NOLOAD: only if it is in this process already. Loading alone initialises nothing.
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        return None


def release_openmp_threads() -> None:
    """End the idle OpenMP threads of the calling thread, so that a fork of it can start its own.

    A forked child inherits libgomp's record of its thread pool but not the threads, and waits for them
    for ever in its first parallel region. OpenMP starts new threads when it needs them again.
    """
    try:
        if len(os.listdir("/proc/self/task")) == 1:  # reading the maps takes 4 ms once torch is imported
            return
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    # The sixth field is the path, which may hold spaces.
    libraries = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line}
    for library in libraries:  # wheels bring their own copies (torch, scikit-learn)
        try:
            ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_pause_resource_all(_OMP_PAUSE_HARD)
        except (OSError, AttributeError):  # unloaded meanwhile, or older than OpenMP 5.0
            continue


def huge_page_regions() -> list[int]:
    """Return the addresses of this process's memory that could be in huge pages."""
    regions: list[int] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _, _, _, *name = line.split(maxsplit=5)
            if access == "rw-p" and (not name or name[0].startswith("[heap]")):
                first, end = (int(address, 16) for address in span.split("-"))
                regions += range(-(-first // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE)
    return regions


def collapse(address: int) -> None:
    """Put the memory from an address of :func:`huge_page_regions` on into a huge page, if the kernel can.

    A fork has to write down each page, in both processes: with torch imported these are 80,000 small ones.
    Does nothing that a program could see. Needs Linux 6.1.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
