"""The cap on TensorFlow's GPU memory in this process.

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

from collections.abc import Sequence
from typing import Any, Final

_MIB: Final = 1 << 20


class Hold:
    """The cap of this process, from :func:`hold_to` on.

    Parameters
    ----------
    context : tensorflow.python.eager.context.Context
        What TensorFlow starts its runtime by.
    kind : type
        Its class until now.
    """

    def __init__(self, context: Any, kind: type) -> None:
        self._context = context
        self._kind = kind

    def release(self) -> None:
        """Take the cap away again, unless TensorFlow's runtime has started: it cannot be changed then."""
        limited = self._context.flower_gpu_limited
        self._context.__class__ = self._kind
        del self._context.flower_gpu_limited
        if self._context._context_handle is None:
            for device in limited:
                self._context._virtual_device_map.pop(device, None)


def hold_to(caps_bytes: Sequence[int]) -> Hold | None:
    """Hold TensorFlow to caps, as soon as it looks for GPUs. Starts neither its runtime nor CUDA.

    Programs cannot undo it: of logical devices that they make themselves the limits are reduced to what fits,
    and ``set_memory_growth`` does nothing, as growth is on.

    Parameters
    ----------
    caps_bytes : sequence of int
        For each GPU that this process sees, in CUDA's order; rounded down to whole MiB.

    Returns
    -------
    Hold or None
        To end it; None where TensorFlow's runtime has started already, and has the cap that it got then.
    """
    from tensorflow.python.eager import context as module

    context = module.context()
    if context._context_handle is not None:
        return None
    kind: Any = type(context)
    limits_mib = [max(1, cap // _MIB) for cap in caps_bytes]

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
    return Hold(context, kind)


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
