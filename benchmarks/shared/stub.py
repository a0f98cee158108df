"""A host whose GPUs are played by a stub of NVML; see ``tests/nvml_stub``. Needs a C compiler."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shared.processes import ROOT

if TYPE_CHECKING:
    from nvml_stub import Host

GIB = 1 << 30
_TESTS = str(ROOT / "tests")


def host(folder: Path, gpus: int = 1) -> Host:
    """Make a host with GPUs of 16 GiB and a ledger of its own. Programs started with its ``env`` are on it.

    Raises
    ------
    RuntimeError
        Without a C compiler.
    """
    if _TESTS not in sys.path:
        sys.path.insert(0, _TESTS)
    from nvml_stub import Host

    made = Host(folder / "stub", gpus=gpus, total=16 * GIB)
    path = filter(None, [_TESTS, os.environ.get("PYTHONPATH")])
    made.env["PYTHONPATH"] = os.pathsep.join(path)
    return made


def move_to(made: Host) -> None:
    """Put this process and its future children on a stub host."""
    os.environ |= made.env
    # LD_LIBRARY_PATH has no effect on a running process. But a loaded library is found by its name.
    ctypes.CDLL(str(made.stub_file))
