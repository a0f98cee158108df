"""JAX: its cap is in the environment, where it reads that when it first looks for devices.

Source: ``generate_pjrt_gpu_plugin_options`` in jaxlib.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Mapping
from typing import Final

from flower_gpu.frameworks.framework import Framework, Rule, smaller_fraction

#: Both name the cap; with both set JAX does not start. All versions up to 0.10.2 take the second, older one.
FRACTIONS: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

_FLAGS: Final = "XLA_FLAGS"
_DETERMINISTIC_FLAGS: Final = ("--xla_gpu_deterministic_ops=true",)

_ERRORS: Final = ("XlaRuntimeError", "JaxRuntimeError")


class JAX(Framework):
    """JAX."""

    name, module, last = "JAX", "jax", "jit"
    native = "jaxlib"
    # Seen for jaxlib 0.10. Its other variables are read when it looks for devices, in the worker.
    read_by_native = ("TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE")

    def has_threads(self) -> bool:
        """Tell whether it has looked for devices; importing it starts no threads (seen with 0.10)."""
        # No function of its API tells that without looking for devices.
        return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Have XLA choose kernels for GPUs that give the same bits; on the CPU all of them do."""
        flags = environ.get(_FLAGS, "").split()
        ours = [flag for flag in _DETERMINISTIC_FLAGS if flag not in flags]
        return {_FLAGS: " ".join([*flags, *ours])}

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Tell by its class and text."""
        return type(error).__name__ in _ERRORS and "RESOURCE_EXHAUSTED" in text and "memory" in text.lower()

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Set the cap by the name that the user has used, else by the older one."""
        names = [name for name in FRACTIONS if environ.get(name)] or [FRACTIONS[1]]
        own = {
            name: smaller_fraction(fraction, environ.get(name) or None, name, most=math.inf) for name in names
        }
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **own}

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        """Keep the other name empty."""
        return {name: _empty for name in FRACTIONS if name not in fixed}


def _empty(_: str) -> str:
    return ""
