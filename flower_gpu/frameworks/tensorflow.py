"""TensorFlow, and Keras on it: growth is on, and each GPU is a logical device with a limit.

TensorFlow asks for the whole limit of a logical device at once, unless growth is on: BFCAllocator in
xla/tsl/framework/bfc_allocator.cc begins with 2 MiB if ``allow_growth`` is set, else with ``memory_limit``,
and never has more than that. Its Python API refuses growth for a GPU with logical devices
(``set_memory_growth`` in tensorflow/python/eager/context.py), but ``TF_FORCE_GPU_ALLOW_GROWTH``, which every
worker with a lease has, overrides what programs ask for (``GetAllowGrowthValue`` in gpu_bfc_allocator.cc). So
the two together are a cap, and no more is taken than is needed.

The limit is of that allocator: like the lease's cap without the CUDA context, and without what libraries take
from CUDA themselves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flower_gpu import standard_streams
from flower_gpu.frameworks.framework import Cap, Framework, Hold, is_of

_MIB: Final = 1 << 20
_THREADS: Final = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
# tensorflow/core/util/determinism.h and those who include it.
_NOT_DETERMINISTIC: Final = re.compile(
    r"deterministic (GPU )?implementation|[Dd]eterminism is (not|enabled)|op-determinism"
)


class TensorFlow(Framework):
    """TensorFlow."""

    name, module, last = "TensorFlow", "tensorflow", "config"
    native = "tensorflow"
    # Seen for 2.21. Its other variables are read when it looks for devices, in the worker.
    read_by_native = (
        "TF_CPP_MAX_VLOG_LEVEL",
        "TF_CPP_MIN_LOG_LEVEL",
        "TF_CPP_VMODULE",
        "TF_ENABLED_DEVICE_TYPES",
        "TF_ENABLE_ONEDNN_OPTS",
    )
    # PyTorch's optimizers import Triton; a process that has TensorFlow aborts then ("registered more than
    # once": both have an LLVM), and with Triton first it does not. Seen with TensorFlow 2.21 and torch 2.15.
    # A task with PyTorch may get a fork of the same server.
    comes_after = "triton"

    def has_threads(self) -> bool:
        """Tell whether it has made a tensor; importing it starts no threads (seen with 2.21)."""
        # No function of its API tells that without making one.
        context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
        return getattr(context, "_context_handle", None) is not None

    def seed(self, seed: int) -> None:
        """Seed the global generators."""
        sys.modules["tensorflow"].random.set_seed(seed & (1 << 31) - 1)

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Set the number of its threads, where the user has not: sums are cut into as many parts."""
        return {name: environ.get(name) or str(threads) for name in _THREADS}

    def be_deterministic(self) -> None:
        """Turn deterministic operations on, as an error where there is none."""
        sys.modules["tensorflow"].config.experimental.enable_op_determinism()

    def not_deterministic(self, text: str) -> str | None:
        """Return the line of its error that says so."""
        lines = (line.strip() for line in text.splitlines())
        return next((f"TensorFlow: {line}" for line in lines if _NOT_DETERMINISTIC.search(line)), None)

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Return True by its class and text.

        The texts are those of TensorFlow from 2.4 on. Kernels that MLIR has compiled, as that of ``Mul``,
        have the second one (https://github.com/SciSharp/TensorFlow.NET/issues/881). The last one is of a copy
        to a GPU without room for it. It names the CPU, too, where the data were.
        """
        if is_of(error, "tensorflow", "ResourceExhaustedError"):
            is_of_gpu = "device:CPU" not in text
            return is_of_gpu and ("OOM when allocating" in text or "failed to allocate memory" in text)
        is_copy = is_of(error, "tensorflow", "InternalError") and "Dst tensor is not initialized" in text
        return is_copy and "device:GPU" in text

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Let its memory grow on demand, up to the limit of :meth:`hold`."""
        return {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}

    def hold(self, caps: Sequence[Cap], on_start: Callable[[], None], *, is_new: bool) -> Hold | None:
        """Hold it to caps, as soon as it looks for GPUs; ``on_start`` is not called."""
        try:
            return hold_to(caps)
        except (ImportError, AttributeError) as error:  # a release whose parts are elsewhere
            standard_streams.tell(f"flower-gpu: this TensorFlow is not held to its lease ({error})")
            return None


class _TensorFlowHold(Hold):
    def __init__(self, context: Any, kind: type) -> None:
        self._context = context  # by which TensorFlow starts its runtime
        self._kind = kind  # its class until now

    def release(self) -> None:
        """Take the cap away again, unless TensorFlow's runtime has started: it cannot be changed then."""
        limited = self._context.flower_gpu_limited
        self._context.__class__ = self._kind
        del self._context.flower_gpu_limited
        if self._context._context_handle is None:
            for device in limited:
                self._context._virtual_device_map.pop(device, None)


def hold_to(caps: Sequence[Cap]) -> Hold | None:
    """Hold TensorFlow to caps, rounded down to whole MiB, without starting its runtime or CUDA.

    Programs cannot undo it: of logical devices that they make themselves the limits are reduced to what fits,
    and ``set_memory_growth`` does nothing, as growth is on. None where its runtime has started already, and
    has the cap that it got then.
    """
    from tensorflow.python.eager import context as module

    context = module.context()
    if context._context_handle is not None:
        return None
    kind: Any = type(context)
    limits_mib = [max(1, cap.cap_bytes // _MIB) for cap in caps]

    # A class, and not functions of the public tf.config: that exists under several names, which all end here.
    class Limited(kind):  # type: ignore[misc]
        def _initialize_physical_devices(self, *args: Any, **kwargs: Any) -> None:
            super()._initialize_physical_devices(*args, **kwargs)
            if self.flower_gpu_limited or self._context_handle is not None:
                return
            gpus = [device for device in self._physical_devices if device.device_type == "GPU"]
            # strict=False: TensorFlow leaves out GPUs that it cannot use.
            self.flower_gpu_limited.update(zip(gpus, limits_mib, strict=False))
            for gpu, limit_mib in self.flower_gpu_limited.items():
                own = self._virtual_device_map.get(gpu)
                whole = [module.LogicalDeviceConfiguration(memory_limit=limit_mib)]
                super().set_logical_device_configuration(gpu, reduced(own, limit_mib) if own else whole)

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
    """Return a program's own logical devices of one GPU, with limits that together fit ``limit_mib``.

    One without a limit stays: TensorFlow refuses it, and tells why.
    """
    asked = sum(device.memory_limit or 0 for device in devices)
    if asked <= limit_mib:
        return list(devices)
    return [
        device._replace(memory_limit=device.memory_limit and max(1, device.memory_limit * limit_mib // asked))
        for device in devices
    ]
