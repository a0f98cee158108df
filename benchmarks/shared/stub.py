"""A host whose GPUs a stub of NVIDIA's library plays; see ``tests/nvml_stub``. Needs a C compiler."""

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
    """Make a host of GPUs of 16 GiB with a ledger of its own. Programs that start with its ``env`` are on it.

    Raises
    ------
    RuntimeError
        Without a C compiler.
    """
    if _TESTS not in sys.path:
        sys.path.insert(0, _TESTS)
    from nvml_stub import Host

    made = Host(folder / "stub", gpus=gpus, total=16 * GIB)
    ledger = folder / "ledger"  # GPUs that are not there are not the machine's
    ledger.mkdir()
    path = filter(None, [_TESTS, os.environ.get("PYTHONPATH")])
    made.env |= {"FLOWER_GPU_LEDGER_DIR": str(ledger), "PYTHONPATH": os.pathsep.join(path)}
    return made


def move_to(made: Host) -> None:
    """Put this process on a stub host, and all that it starts from now on."""
    os.environ |= made.env
    ctypes.CDLL(
        str(made.stub_file)
    )  # this process runs already: a library that is loaded is found by its name
