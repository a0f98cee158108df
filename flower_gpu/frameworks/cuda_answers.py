"""Lets ``torch.cuda.is_available`` and ``device_count`` answer from NVML, without starting CUDA.

Modules often begin with ``DEVICE = "cuda" if torch.cuda.is_available() else "cpu"``. This starts CUDA, and
after that no fork can use a GPU. PyTorch has a check with NVML of its own, but still starts CUDA if NVML
fails or a MIG device is visible. PyTorch also opens all cards. If it cannot open one, because of the GPU
guard or a control group, it warns and counts no GPU, although that card belongs to another lease.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Final

from flower_gpu import standard_streams
from flower_gpu.frameworks.framework import AfterImport
from flower_gpu.gpu import drivers, inventory

_CUDA_SUCCESS = 0


class CUDAAnswers:
    """The answers of ``torch.cuda.is_available`` and ``torch.cuda.device_count`` in this process."""

    def __init__(self) -> None:
        self._asks_nvml = False
        #: True if a module of this process has called one of the functions while they used NVML
        self.has_asked = False
        self._waits_for_torch = False
        self._has_lease = False

    def ask_nvml(self) -> None:
        """Let the functions use NVML, also if PyTorch is imported later."""
        self._asks_nvml = True
        if "torch" in sys.modules:
            self._wrap()
        elif not self._waits_for_torch:
            self._waits_for_torch = True
            AfterImport("torch", self._wrap)

    def ask_cuda(self) -> None:
        """Let the functions use CUDA again, in a fork that may start it."""
        self._asks_nvml = False

    def count_leased(self, has_lease: bool) -> None:
        """Let ``device_count`` count the GPUs of this worker's lease only, until CUDA has started."""
        self._has_lease = has_lease
        self._wrap()

    def _wrap(self) -> None:
        torch: Any = sys.modules["torch"]
        if torch.version.cuda is None or hasattr(torch.cuda.device_count, "asks_nvml"):
            return
        count = torch.cuda.device_count
        self._replace("device_count", self._count, lambda: self._count_leased() or count())
        self._replace("is_available", lambda: self._count() > 0, torch.cuda.is_available)

    def _replace(self, name: str, in_server: Callable[[], Any], in_worker: Callable[[], Any]) -> None:
        cuda: Any = sys.modules["torch"].cuda
        original = getattr(cuda, name)

        @wraps(original)
        def replacement() -> Any:
            # Decided at each call: a module may keep a reference, which must behave normally in a worker.
            return in_server() if self._asks_nvml else in_worker()

        for attribute in ("cache_clear", "cache_info"):  # some versions of PyTorch cache the count
            if hasattr(original, attribute):
                setattr(replacement, attribute, getattr(original, attribute))
        vars(replacement)["asks_nvml"] = True
        setattr(cuda, name, replacement)

    def _count_leased(self) -> int:
        """Return the number of GPUs in the lease, or 0 to ask CUDA: without a lease, or if NVML fails."""
        visible = os.environ.get(drivers.of_host().visible_variable, "")
        return len(inventory.take_of(visible.split(","))) if self._has_lease else 0

    def _count(self) -> int:
        """Return the number of GPUs that CUDA would show, which are those that NVML can open."""
        self.has_asked = True
        if drivers.hides_all(os.environ):
            return 0
        host = inventory.take_here()
        visible = host.visible(os.environ.get(drivers.of_host().visible_variable))
        devices = [gpu for gpu in visible if gpu.uuid]
        cards = [gpu for gpu in devices if gpu.mig_parent is None]
        count = len(cards) or min(1, len(devices))  # CUDA uses only one MIG device
        if not count:
            broken = next((f"GPU {gpu.index}: {gpu.problem}" for gpu in host.gpus if gpu.problem), "")
            if reason := host.problem or broken:
                _tell_no_gpu(reason)
        return count


#: The answers of this process, because ``torch.cuda`` is shared by all of its code.
ANSWERS: Final = CUDAAnswers()


@cache
def _tell_no_gpu(reason: str) -> None:
    if not reason.startswith(drivers.of_host().absent):
        standard_streams.tell(
            "flower-gpu: a module asked for GPUs when it was imported for all workers, and there is "
            f"none ({reason}). If it chooses its device at its import, that is the CPU"
        )


def initialized_cuda_devices() -> int | None:
    """Return the number of visible GPUs if this process has initialised CUDA, or None.

    With None, a forked child can initialise CUDA for itself.
    """
    libcuda = _loaded_cuda()
    count = ctypes.c_int(0)
    if libcuda is None or libcuda.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return None  # CUDA_ERROR_NOT_INITIALIZED
    return count.value


def _loaded_cuda() -> ctypes.CDLL | None:
    try:
        # RTLD_NOLOAD: only if the library is loaded already. Loading it does not initialise CUDA.
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        return None
