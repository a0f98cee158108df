"""What PyTorch says of GPUs: it asks NVML, and CUDA stays untouched.

Modules often begin with ``DEVICE = "cuda" if torch.cuda.is_available() else "cpu"``. That starts CUDA, after
which no fork can use a GPU. PyTorch can ask NVML by itself, but starts CUDA all the same where NVML fails or
a MIG device is visible. And it looks at all cards: where one of them cannot be opened it warns, and counts
none, though that is another one's, by the GPU guard or a control group.
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
from flower_gpu.gpu import inventory
from flower_gpu.gpu.nvml import NO_DRIVER

_CUDA_SUCCESS = 0


class CUDAAnswers:
    """What ``is_available`` and ``device_count`` of ``torch.cuda`` say in this process."""

    def __init__(self) -> None:
        self._asks_nvml = False
        #: Whether some module of this process wanted to know of GPUs while NVML was asked.
        self.has_asked = False
        self._waits_for_torch = False
        self._has_lease = False

    def ask_nvml(self) -> None:
        """Have them ask NVML, also if PyTorch is imported later."""
        self._asks_nvml = True
        if "torch" in sys.modules:
            self._wrap()
        elif not self._waits_for_torch:
            self._waits_for_torch = True
            AfterImport("torch", self._wrap)

    def ask_cuda(self) -> None:
        """Have them ask CUDA again, in a fork that may start it."""
        self._asks_nvml = False

    def count_leased(self, has_lease: bool) -> None:
        """Have ``device_count`` look at the GPUs of this worker's lease only; CUDA has not started there."""
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
        def asked() -> Any:  # a module may keep it: in a worker it must be what it was
            return in_server() if self._asks_nvml else in_worker()

        for attribute in ("cache_clear", "cache_info"):  # of a version of PyTorch that remembers the count
            if hasattr(original, attribute):
                setattr(asked, attribute, getattr(original, attribute))
        vars(asked)["asks_nvml"] = True
        setattr(cuda, name, asked)

    def _count_leased(self) -> int:
        """Count the GPUs of the lease; 0: there is none, or CUDA has started and knows, or NVML does not."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return len(inventory.take_of(visible.split(","))) if self._has_lease else 0

    def _count(self) -> int:
        """Count the GPUs that CUDA would show: those that NVML can open."""
        self.has_asked = True
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible == "":
            return 0
        found = inventory.take_here()
        cards = [gpu for gpu in found.visible(visible) if gpu.uuid]
        whole = [gpu for gpu in cards if gpu.mig_parent is None]
        count = len(whole) or min(1, len(cards))  # of MIG devices CUDA uses one
        if not count:
            broken = next((f"GPU {gpu.index}: {gpu.problem}" for gpu in found.gpus if gpu.problem), "")
            if reason := found.problem or broken:
                _say_none(reason)
        return count


#: Those of this process: ``torch.cuda`` is one for all of its code.
ANSWERS: Final = CUDAAnswers()


@cache
def _say_none(reason: str) -> None:
    if not reason.startswith(NO_DRIVER):
        standard_streams.tell(
            "flower-gpu: a module asked for GPUs when it was imported for all workers, and there is "
            f"none ({reason}). If it chooses its device at its import, that is the CPU"
        )


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
