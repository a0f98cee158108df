"""Checks that PyTorch's build fits the driver, and that CUDA works in a worker.

CUDA is tested in a real worker with a real lease, because a call runs in the same way. The doctor's own
process does not import torch, and starts nothing on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import os
import runpy
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Final, NamedTuple

from flower_gpu.calls.settings import call_settings
from flower_gpu.doctor import FindingParts
from flower_gpu.errors import ConfigError, LeaseError, LeaseTimeoutError
from flower_gpu.gpu import drivers, inventory
from flower_gpu.gpu.cuda_version import how_to_install, is_too_new, what_to_change
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.lease import Lease
from flower_gpu.printable import first_line, format_bytes

_LIBRARY: Final = "libcuda.so.1"
_LEASE_WAIT_S: Final = 1.0
#: Timeout of the trial in seconds. It includes the start of a fork server, which imports PyTorch.
_TRIAL_S: Final = 120.0
#: GPU memory of the trial, in addition to the CUDA context.
_TRIAL_BYTES: Final = 256 << 20
#: Size of the allocation that must fail, beyond the cap.
_ABOVE_CAP_BYTES: Final = 16 << 20
#: Rows and columns of the matrices that the trial multiplies.
_MATRIX_SIZE: Final = 256
#: Maximum number of characters of the worker's output that are shown.
_MAX_OUTPUT: Final = 600
_SEE_LOGS: Final = "see `nvidia-smi`, and the kernel's log (dmesg) for lines with NVRM or Xid"
_NOT_MEASURED: Final = (
    "the driver does not report how much memory processes of this account use, as in containers. The size of "
    "CUDA contexts, and the memory that calls without PyTorch need, cannot be measured there"
)
_SET_INSTEAD: Final = (
    "for JAX, TensorFlow and CuPy set FLOWER_GPU_NUM_GPUS or FLOWER_GPU_MEMORY, or num_gpus or gpu_memory in "
    "the code: without it each call has a GPU to itself"
)


class Build(NamedTuple):
    """Version of the installed PyTorch, and the CUDA version it was built for (None for a CPU build)."""

    version: str
    cuda: str | None


def build() -> Build | None:
    """Return the build of the installed PyTorch without importing it, or None if it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    values = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    return Build(values["__version__"], values["cuda"])


def torch(host_gpus: Inventory) -> Iterator[FindingParts]:
    """Check that the build of PyTorch supports these GPUs and their driver."""
    installed = build()
    if installed is None:
        yield "problem", "PyTorch is not installed beside flower-gpu", "pip install torch"
        return
    text = f"torch {installed.version} for {f'CUDA {installed.cuda}' if installed.cuda else 'the CPU only'}"
    if not host_gpus.usable:
        yield "ok", text
        return
    if installed.cuda is None:
        text += ", on a host with a GPU: calls run on the CPU"
        yield "problem", text, how_to_install(host_gpus.cuda_version)
        return
    supported, reason = driver_cuda()
    if supported is None:
        text += f", but CUDA's part of driver {host_gpus.driver_version} cannot be used: {reason}"
        todo = "install all of the driver; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield "problem", text, todo
    elif is_too_new(installed.cuda, supported):
        text += f", but driver {host_gpus.driver_version} has CUDA {supported[0]}.{supported[1]} at most"
        yield "problem", text, what_to_change(installed.cuda, supported)
    else:
        yield "ok", f"{text}; the driver has CUDA {supported[0]}.{supported[1]}"


def driver_cuda() -> tuple[tuple[int, int] | None, str]:
    """Return the CUDA version of the driver, or None and the reason. Nothing is started on a GPU."""
    number = ctypes.c_int()
    try:
        code = ctypes.CDLL(_LIBRARY).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return None, str(error)
    if code or not number.value:
        return None, f"cuDriverGetVersion answers {code}"
    return (number.value // 1000, number.value % 1000 // 10), ""


def works(host_gpus: Inventory) -> Iterator[FindingParts]:
    """Check that CUDA works in a worker with a lease, a memory cap and its GPU, as for a call."""
    seen = host_gpus.visible(os.environ.get(drivers.of_host().visible_variable))
    candidates = [gpu for gpu in seen if gpu.is_usable]
    installed = build()
    if not candidates or installed is None or installed.cuda is None or driver_cuda()[0] is None:
        # The check of PyTorch reports this problem.
        return
    if os.environ.get("FLOWER_GPU_POLICY") == "never":
        return
    # Import it here, because a host without a GPU does not need it.
    from flower_gpu.calls import runner

    footprints = Footprints()
    size = _TRIAL_BYTES + max(footprints.context(gpu.name) for gpu in candidates)
    options = {"gpu_memory": size, "on_oom": "fail", "lease_timeout_s": _LEASE_WAIT_S, "timeout_s": _TRIAL_S}
    output = io.StringIO()
    try:
        settings = call_settings({**options, "name": "flower-gpu doctor"})
        with redirect_stdout(output), redirect_stderr(output):
            findings = runner.run_call(f"{__name__}:trial", settings=settings, kind="trial", by_name=True)
    except ConfigError as error:
        yield "problem", str(error), "correct that"
    except LeaseTimeoutError:
        yield "note", "no worker was tested: all GPUs are in use", "try again later (`flower-gpu leases`)"
    except LeaseError as error:
        yield "note", f"no worker was tested: {error}"
    except Exception as error:
        # The call of a client would fail with the same exception, so report any type.
        yield "problem", f"a worker with a lease does not work: {_first_line(error)}", _SEE_LOGS
    else:
        yield from findings
    if text := " ".join(output.getvalue().split()):
        yield "note", f"the worker said: {text[:_MAX_OUTPUT]}"


def trial() -> list[FindingParts]:
    """Return the findings of a trial of CUDA in this process, which must be a worker.

    The trial allocates a little memory, tries to allocate more than the cap, and multiplies matrices.
    """
    lease = Lease.from_environment(os.environ)
    if lease is None or not lease.shares:
        return [("problem", "a worker got no lease: calls run on the CPU", _SEE_LOGS)]
    share = lease.shares[0]
    gpu = f"GPU {share.index} ({share.name})"
    lease_of, cap = format_bytes(share.memory_bytes), format_bytes(share.cap_bytes)
    findings: list[FindingParts] = []
    try:
        import torch

        step = "does not start CUDA"
        torch.ones(1 << 16, device="cuda").cpu()
        findings.append(
            ("ok", f"a worker has a lease of {lease_of} on {gpu}, of which PyTorch may take {cap}")
        )
        listed = [process for gpu in inventory.take_of([share.uuid]) for process in gpu.processes or ()]
        if not any(process.pid == os.getpid() and process.used_bytes for process in listed):
            findings.append(("note", f"{gpu}: {_NOT_MEASURED}", _SET_INSTEAD))
        step = "fails when it asks for more than its cap"
        findings.append(_above_cap(share.cap_bytes))
        step = "cannot compute"
        numbers = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device="cuda")
        if (numbers @ numbers).sum().item() == _MATRIX_SIZE**3:
            findings.append(("ok", f"a worker computed on {gpu}, with the right result"))
        else:
            findings.append(("problem", f"a worker computed on {gpu}, with a wrong result", _SEE_LOGS))
    except Exception as error:
        findings.append(("problem", f"a worker {step} on {gpu}: {_first_line(error)}", _SEE_LOGS))
    return findings


def _above_cap(cap_bytes: int) -> FindingParts:
    import torch

    try:
        torch.empty(cap_bytes + _ABOVE_CAP_BYTES, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        if torch.cuda.max_memory_reserved() <= cap_bytes:
            return "ok", "a worker is refused more than that by PyTorch, with its OutOfMemoryError"
    return "problem", "a worker was given more than its cap", _SEE_LOGS


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"
