"""PyTorch's build against the driver, and whether CUDA works: tried in a worker as a call gets it."""

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
from flower_gpu.doctor import Found
from flower_gpu.errors import ConfigError, LeaseError, LeaseTimeoutError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.cuda_version import how_to_install, is_too_new, what_to_change
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.lease import Lease
from flower_gpu.printable import format_bytes

_LIBRARY: Final = "libcuda.so.1"
_LEASE_WAIT_S: Final = 1.0
_TRIAL_S: Final = 120.0  # with the start of a fork server, which imports PyTorch
_TRIAL_BYTES: Final = 256 << 20  # of the GPU, beyond CUDA's context
_ABOVE_CAP_BYTES: Final = 16 << 20
_SIDE: Final = 256  # of the matrices that are multiplied
_MOST_SAID: Final = 600  # characters
_SEE_LOGS: Final = "see `nvidia-smi`, and the kernel's log (dmesg) for lines with NVRM or Xid"
_NOT_MEASURED: Final = (
    "the driver does not tell how much memory processes of this account use, as in containers. The size of "
    "CUDA contexts, and the need of calls without PyTorch, cannot be measured there"
)
_SET_INSTEAD: Final = (
    "for JAX, TensorFlow and CuPy set FLOWER_GPU_NUM_GPUS or FLOWER_GPU_MEMORY, or num_gpus or gpu_memory in "
    "the code: without it each call has a GPU to itself"
)


class Build(NamedTuple):
    """The PyTorch that is installed, and the CUDA it was built for."""

    version: str
    cuda: str | None


def build() -> Build | None:
    """Read PyTorch's version and CUDA version, without importing it; None where it is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    values = runpy.run_path(str(Path(found.submodule_search_locations[0]) / "version.py"))
    return Build(values["__version__"], values["cuda"])


def torch(found: Inventory) -> Iterator[Found]:
    """Check that PyTorch can use these GPUs by the way it was built."""
    ours = build()
    if ours is None:
        yield "problem", "PyTorch is not installed beside flower-gpu", "pip install torch"
        return
    text = f"torch {ours.version} for {f'CUDA {ours.cuda}' if ours.cuda else 'the CPU only'}"
    if not found.usable:
        yield "ok", text
        return
    if ours.cuda is None:
        text += ", on a host with a GPU: calls run on the CPU"
        yield "problem", text, how_to_install(found.cuda_version)
        return
    supported, reason = driver_cuda()
    if supported is None:
        text += f", but CUDA's part of driver {found.driver_version} cannot be used: {reason}"
        todo = "install all of the driver; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield "problem", text, todo
    elif is_too_new(ours.cuda, supported):
        text += f", but driver {found.driver_version} has CUDA {supported[0]}.{supported[1]} at most"
        yield "problem", text, what_to_change(ours.cuda, supported)
    else:
        yield "ok", f"{text}; the driver has CUDA {supported[0]}.{supported[1]}"


def driver_cuda() -> tuple[tuple[int, int] | None, str]:
    """Return the CUDA version of the driver, or why it is not known. Nothing is started on a GPU."""
    number = ctypes.c_int()
    try:
        code = ctypes.CDLL(_LIBRARY).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return None, str(error)
    if code or not number.value:
        return None, f"cuDriverGetVersion answers {code}"
    return (number.value // 1000, number.value % 1000 // 10), ""


def works(found: Inventory) -> Iterator[Found]:
    """Check that CUDA works in a worker as a call gets it: with its lease, its cap, and on its GPU."""
    seen = found.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    candidates = [gpu for gpu in seen if gpu.is_usable]
    ours = build()
    if not candidates or ours is None or ours.cuda is None or driver_cuda()[0] is None:
        return  # the check of torch tells
    if os.environ.get("FLOWER_GPU_POLICY") == "never":
        return
    # Here: where there is no GPU nothing of it is needed.
    from flower_gpu.calls import runner

    footprints = Footprints()
    size = _TRIAL_BYTES + max(footprints.context(gpu.name) for gpu in candidates)
    options = {"gpu_memory": size, "on_oom": "fail", "lease_timeout_s": _LEASE_WAIT_S, "timeout_s": _TRIAL_S}
    said = io.StringIO()
    try:
        settings = call_settings({**options, "name": "flower-gpu doctor"})
        with redirect_stdout(said), redirect_stderr(said):
            told = runner.run_call(f"{__name__}:trial", settings=settings, kind="trial", by_name=True)
    except ConfigError as error:
        yield "problem", str(error), "correct that"
    except LeaseTimeoutError:
        yield "note", "a worker was not tried: all GPUs are in use", "try again later (`flower-gpu leases`)"
    except LeaseError as error:
        yield "note", f"a worker was not tried: {error}"
    except Exception as error:  # of the call, whatever it is: a client's would end so, too
        yield "problem", f"a worker with a lease does not work: {_first_line(error)}", _SEE_LOGS
    else:
        yield from told
    if text := " ".join(said.getvalue().split()):
        yield "note", f"the worker said: {text[:_MOST_SAID]}"


def trial() -> list[Found]:
    """Take a little memory, ask for more than the cap, compute: what a call does; runs in a worker."""
    lease = Lease.from_environment(os.environ)
    if lease is None or not lease.shares:
        return [("problem", "a worker got no lease: calls run on the CPU", _SEE_LOGS)]
    share = lease.shares[0]
    gpu = f"GPU {share.index} ({share.name})"
    lease_of, cap = format_bytes(share.memory_bytes), format_bytes(share.cap_bytes)
    told: list[Found] = []
    try:
        import torch

        step = "does not start CUDA"
        torch.ones(1 << 16, device="cuda").cpu()
        told.append(("ok", f"a worker has a lease of {lease_of} on {gpu}, of which PyTorch may take {cap}"))
        listed = [one for found in inventory.take_of([share.uuid]) for one in found.processes or ()]
        if not any(one.pid == os.getpid() and one.used_bytes for one in listed):
            told.append(("note", f"{gpu}: {_NOT_MEASURED}", _SET_INSTEAD))
        step = "fails when it asks for more than its cap"
        told.append(_above_cap(share.cap_bytes))
        step = "cannot compute"
        numbers = torch.ones(_SIDE, _SIDE, device="cuda")
        if (numbers @ numbers).sum().item() == _SIDE**3:
            told.append(("ok", f"a worker computed on {gpu}, with the right result"))
        else:
            told.append(("problem", f"a worker computed on {gpu}, with a wrong result", _SEE_LOGS))
    except Exception as error:
        told.append(("problem", f"a worker {step} on {gpu}: {_first_line(error)}", _SEE_LOGS))
    return told


def _above_cap(cap_bytes: int) -> Found:
    import torch

    try:
        torch.empty(cap_bytes + _ABOVE_CAP_BYTES, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        if torch.cuda.max_memory_reserved() <= cap_bytes:
            return "ok", "a worker is refused more than that by PyTorch, with its OutOfMemoryError"
    return "problem", "a worker was given more than its cap", _SEE_LOGS


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"
