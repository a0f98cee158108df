"""JAX reads its memory cap from the environment when it first looks for devices.

Source: ``generate_pjrt_gpu_plugin_options`` in jaxlib.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Mapping
from typing import Final

from flower_gpu.frameworks.framework import Framework, Rule, smaller_fraction

#: Both variables set the cap, and JAX does not start with both. All versions up to 0.10.2 accept the second
#: one.
FRACTIONS: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

_FLAGS: Final = "XLA_FLAGS"
_DETERMINISTIC_FLAGS: Final = ("--xla_gpu_deterministic_ops=true",)

_ERRORS: Final = ("XlaRuntimeError", "JaxRuntimeError")


class JAX(Framework):
    """JAX."""

    name, module, last = "JAX", "jax", "jit"
    native = "jaxlib"
    # Observed with jaxlib 0.10. Other variables are read when it looks for devices, in the worker.
    read_by_native = ("TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE")

    def has_threads(self) -> bool:
        """Return True if JAX has looked for devices. Its import starts no threads (observed with 0.10)."""
        # All public functions for this look for devices themselves.
        return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Let XLA choose deterministic kernels for GPUs. On the CPU all kernels are deterministic."""
        flags = environ.get(_FLAGS, "").split()
        added = [flag for flag in _DETERMINISTIC_FLAGS if flag not in flags]
        return {_FLAGS: " ".join([*flags, *added])}

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Return True for JAX's error class with the code and text of missing memory."""
        return type(error).__name__ in _ERRORS and "RESOURCE_EXHAUSTED" in text and "memory" in text.lower()

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Set the cap in the variable that the user has set, or else in the older one."""
        names = [name for name in FRACTIONS if environ.get(name)] or [FRACTIONS[1]]
        fractions = {
            name: smaller_fraction(fraction, environ.get(name) or None, name, limit=math.inf)
            for name in names
        }
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **fractions}

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        """Keep the other variable empty, because JAX does not start with both."""
        return {name: _empty for name in FRACTIONS if name not in fixed}


def _empty(_: str) -> str:
    return ""
