"""The libraries of cuDNN. It loads most of them when it is first used: some 600 MB, in each process anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

#: Variables that they read while they are loaded, and never again (seen in cuDNN 9.24).
READ_WHEN_LOADED: Final = (
    *(f"CUDNN_LOG{what}_DBG" for what in ("INFO", "WARN", "ERR", "LEVEL", "DEST")),
    *("CUDNN_LIB_CONFIG", "CUDNN_ERRSRC_DBG", "CUDNN_STRICT_DBG", "CUDNN_CONV_WSCAP_DBG"),
    *("CUDNN_FORCE_JIT_DBG", "CUDNN_JIT_FLAGS_DBG", "CUDNN_SKIPHEUR_DBG", "CUDNN_RNN_WS_SIZE_DBG"),
    *("CUDNN_PREFER_SM_COUNT_DBG", "CUDNN_MALLOCCOUNT_DBG", "CUDNN_FREECOUNT_DBG", "CUDNN_GA10X_SMEM_DBG"),
    *("CUDNN_FORT_FFMA_CONV1D_SELECT", "CASK_LOG_INFO", "CASK_ENHANCED_API_LOGGING"),
    *("NVRTC_DISABLE_CONCURRENT_NVVM", "NVRTC_INTERNAL_GLOBAL_LOCK", "NVRTC_DISABLE_PCH"),
    "NVRTC_PCH_HEAP_SIZE",
)

# In this order each finds what it needs among those before it, whatever is in LD_LIBRARY_PATH. Two more are
# left to cuDNN: before 9.26 engines_tensor_ir is not set up rightly when somebody else loads it
# (google-ml-infra/rules_ml_toolchain#292), and PyTorch calls nothing of ext.
_PARTS: Final = ("graph", "ops", "cnn", "adv", "heuristic", "engines_precompiled", "engines_runtime_compiled")

_FIRST: Final = re.compile(r"libcudnn\.so\.(\d+)(\.\d+)*")


def files() -> list[str]:
    """Return the files of these libraries, of the cuDNN that this process has; empty where it has none.

    They lie beside the first one, which frameworks are linked with. Another cuDNN of the host is another one.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, name = line.rpartition("/")
        if found := _FIRST.fullmatch(name):
            folder = Path(line.split(maxsplit=5)[5]).parent
            return [str(folder / f"libcudnn_{part}.so.{found[1]}") for part in _PARTS]
    return []
