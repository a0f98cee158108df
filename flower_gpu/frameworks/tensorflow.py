"""TensorFlow, and Keras on TensorFlow: memory growth, and a logical device with a limit for each GPU.

Without growth, TensorFlow allocates the whole limit of a logical device at once. BFCAllocator in
xla/tsl/framework/bfc_allocator.cc starts with 2 MiB if ``allow_growth`` is set, or else with
``memory_limit``, and never exceeds that limit. The Python API refuses growth for a GPU with logical devices
(``set_memory_growth`` in tensorflow/python/eager/context.py). But ``TF_FORCE_GPU_ALLOW_GROWTH``, which every
worker with a lease has, overrides the API (``GetAllowGrowthValue`` in gpu_bfc_allocator.cc). Both together
are a cap without preallocation.

The limit applies to that allocator, like the cap of the lease. It excludes the CUDA context and the memory
that libraries allocate from CUDA directly.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flower_gpu import standard_streams
from flower_gpu.frameworks.framework import Cap, Framework, Hold, is_of

_MIB: Final = 1 << 20
_THREADS: Final = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
# Texts in tensorflow/core/util/determinism.h and the files that include it
_NOT_DETERMINISTIC: Final = re.compile(
    r"deterministic (GPU )?implementation|[Dd]eterminism is (not|enabled)|op-determinism"
)


class TensorFlow(Framework):
    """TensorFlow."""

    name, module, last = "TensorFlow", "tensorflow", "config"
    native = "tensorflow"
    # Observed with 2.21. Other variables are read when it looks for devices, in the worker.
    read_by_native = (
        "TF_CPP_MAX_VLOG_LEVEL",
        "TF_CPP_MIN_LOG_LEVEL",
        "TF_CPP_VMODULE",
        "TF_ENABLED_DEVICE_TYPES",
        "TF_ENABLE_ONEDNN_OPTS",
    )
    # PyTorch's optimizers import Triton. A process that has imported TensorFlow aborts then ("registered more
    # than once"), because both contain LLVM. With Triton first, it does not abort. Observed with TensorFlow
    # 2.21 and torch 2.15. A task with PyTorch may get a fork of the same server.
    comes_after = "triton"

    def has_threads(self) -> bool:
        """Return True if TensorFlow has created a tensor. Its import starts no threads (seen with 2.21)."""
        # All public functions for this create a tensor themselves.
        context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
        return getattr(context, "_context_handle", None) is not None

    def seed(self, seed: int) -> None:
        """Seed the global generators."""
        sys.modules["tensorflow"].random.set_seed(seed & (1 << 31) - 1)

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Set the number of threads unless the user has, because sums are split into this many parts."""
        return {name: environ.get(name) or str(threads) for name in _THREADS}

    def be_deterministic(self) -> None:
        """Turn deterministic operations on. Operations without one raise an error."""
        sys.modules["tensorflow"].config.experimental.enable_op_determinism()

    def not_deterministic(self, text: str) -> str | None:
        """Return the line of TensorFlow's error about a missing deterministic operation, or None."""
        lines = (line.strip() for line in text.splitlines())
        return next((f"TensorFlow: {line}" for line in lines if _NOT_DETERMINISTIC.search(line)), None)

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Return True for the classes and texts of TensorFlow 2.4 and later.

        Kernels compiled by MLIR, such as ``Mul``, have the second text
        (https://github.com/SciSharp/TensorFlow.NET/issues/881). The last one comes from a copy to a full GPU.
        It also names the CPU as the source of the data.
        """
        if is_of(error, "tensorflow", "ResourceExhaustedError"):
            is_of_gpu = "device:CPU" not in text
            return is_of_gpu and ("OOM when allocating" in text or "failed to allocate memory" in text)
        is_copy = is_of(error, "tensorflow", "InternalError") and "Dst tensor is not initialized" in text
        return is_copy and "device:GPU" in text

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Let the memory grow on demand, up to the limit of :meth:`hold`."""
        return {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}

    def hold(self, caps: Sequence[Cap], *, is_new: bool) -> Hold | None:
        """Apply caps as soon as TensorFlow looks for GPUs."""
        try:
            return hold_to(caps)
        except (ImportError, AttributeError) as error:  # private names have moved in this release
            standard_streams.tell(f"flower-gpu: this TensorFlow is not limited to its lease ({error})")
            return None


class _TensorFlowHold(Hold):
    def __init__(self, context: Any, kind: type) -> None:
        self._context = context  # the object that starts TensorFlow's runtime
        self._kind = kind  # original class of the context

    def release(self) -> None:
        """Remove the cap, unless TensorFlow's runtime has started. It cannot be changed after that."""
        limited = self._context.flower_gpu_limited
        self._context.__class__ = self._kind
        del self._context.flower_gpu_limited
        if self._context._context_handle is None:
            for device in limited:
                self._context._virtual_device_map.pop(device, None)


def hold_to(caps: Sequence[Cap]) -> Hold | None:
    """Apply caps to TensorFlow, rounded down to whole MiB, without starting its runtime or CUDA.

    Programs cannot undo the caps: the limits of their own logical devices are reduced to fit, and
    ``set_memory_growth`` has no effect, because growth is on. Returns None if the runtime has started
    already. It keeps the caps from its start then.
    """
    from tensorflow.python.eager import context as module

    context = module.context()
    if context._context_handle is not None:
        return None
    kind: Any = type(context)
    limits_mib = [max(1, cap.cap_bytes // _MIB) for cap in caps]

    # Overrides the class, because the functions of the public tf.config exist under several names that all
    # call it.
    class Limited(kind):  # type: ignore[misc]
        def _initialize_physical_devices(self, *args: Any, **kwargs: Any) -> None:
            super()._initialize_physical_devices(*args, **kwargs)
            if self.flower_gpu_limited or self._context_handle is not None:
                return
            gpus = [device for device in self._physical_devices if device.device_type == "GPU"]
            # strict=False: TensorFlow leaves out GPUs that it cannot use.
            self.flower_gpu_limited.update(zip(gpus, limits_mib, strict=False))
            for gpu, limit_mib in self.flower_gpu_limited.items():
                of_program = self._virtual_device_map.get(gpu)
                whole = [module.LogicalDeviceConfiguration(memory_limit=limit_mib)]
                devices = reduced(of_program, limit_mib) if of_program else whole
                super().set_logical_device_configuration(gpu, devices)

        def set_memory_growth(self, dev: Any, enable: bool) -> None:
            self._initialize_physical_devices()
            if dev not in self.flower_gpu_limited:
                super().set_memory_growth(dev, enable)

        def set_logical_device_configuration(self, dev: Any, virtual_devices: Any) -> None:
            self._initialize_physical_devices()
            if dev in self.flower_gpu_limited:
                virtual_devices = reduced(virtual_devices, self.flower_gpu_limited[dev])
            super().set_logical_device_configuration(dev, virtual_devices)

    context.flower_gpu_limited = {}
    context.__class__ = Limited
    return _TensorFlowHold(context, kind)


def reduced(devices: Sequence[Any], limit_mib: int) -> list[Any]:
    """Return a program's logical devices of one GPU, with limits that together fit into ``limit_mib``.

    A device without a limit is kept. TensorFlow refuses it and gives the reason.
    """
    total_mib = sum(device.memory_limit or 0 for device in devices)
    if total_mib <= limit_mib:
        return list(devices)
    return [
        device._replace(
            memory_limit=device.memory_limit and max(1, device.memory_limit * limit_mib // total_mib)
        )
        for device in devices
    ]
