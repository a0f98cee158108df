"""PyTorch's build against the driver, and whether CUDA works: tried in a worker as a call gets it."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import os
import runpy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from flower_gpu.calls.settings import CallSettings
from flower_gpu.doctor import Found, trial
from flower_gpu.doctor.gpus import NOT_MEASURED, SET_INSTEAD
from flower_gpu.errors import ConfigError, LeaseError, LeaseTimeoutError
from flower_gpu.flower import confine
from flower_gpu.flower.confine import Allowed
from flower_gpu.gpu import inventory
from flower_gpu.gpu.cuda_version import how_to_install, is_too_new, what_to_change
from flower_gpu.gpu.inventory import GPU, Inventory
from flower_gpu.leases.footprint import Footprints
from flower_gpu.workers.confinement import Confinement

_LIBRARY = "libcuda.so.1"
_LEASE_WAIT_S = 1.0
_TRIAL_S = 120.0  # with the start of a fork server, which imports PyTorch
_TRIAL = "flower_gpu.doctor.trial:run"
_POLICY = "FLOWER_GPU_POLICY"
_SEE_LOGS = "see `nvidia-smi`, and the kernel's log (dmesg) for lines with NVRM or Xid"
_MOST_SAID = 600  # characters


class Build(NamedTuple):
    """The PyTorch that is installed, and the CUDA it was built for."""

    version: str
    cuda: str | None


def build() -> Build | None:
    """Read what PyTorch was built for, without importing it; None where it is not installed."""
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


def works(found: Inventory, *, confined: bool = False) -> Iterator[Found]:
    """Check that CUDA works, in a worker that a call would get: with its lease, its cap, and on its GPU.

    ``confined``: in a confined worker, too.
    """
    seen = inventory.visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    candidates = [gpu for gpu in seen if gpu.is_usable]
    ours = build()
    if not candidates or ours is None or ours.cuda is None or driver_cuda()[0] is None:
        return  # the check of torch tells
    if os.environ.get(_POLICY) == "never":
        return
    try:
        yield from _tried("a worker", candidates, nullcontext())
        if confined:
            yield from _tried("a confined worker", candidates, confine.for_message(Allowed(), ()))
    except ConfigError as error:
        yield "problem", str(error), "correct that"


def _tried(
    who: str, candidates: list[GPU], confinement: AbstractContextManager[Confinement | None]
) -> Iterator[Found]:
    # Here: where there is no GPU nothing of it is needed.
    from flower_gpu.calls import runner

    footprints = Footprints()
    size = trial.BYTES + max(footprints.context(gpu.name) for gpu in candidates)
    options = {"gpu_memory": size, "on_oom": "fail", "lease_timeout_s": _LEASE_WAIT_S, "timeout_s": _TRIAL_S}
    settings = CallSettings.resolve({**options, "name": "flower-gpu doctor"})
    said = io.StringIO()
    try:
        with confinement as found, redirect_stdout(said), redirect_stderr(said):
            told = runner.run_call(_TRIAL, settings=settings.confined(found), kind="trial", by_name=True)
    except LeaseTimeoutError:
        yield "note", f"{who} was not tried: all GPUs are in use", "try again later (`flower-gpu leases`)"
        return
    except LeaseError as error:
        yield "note", f"{who} was not tried: {error}"
        return
    except ConfigError:
        raise  # of a setting: the same for each worker
    except Exception as error:  # of the call, whatever it is: a client's would end so, too
        text = str(error).strip().partition("\n")[0]
        yield "problem", f"{who} with a lease does not work: {type(error).__name__}: {text}", _SEE_LOGS
        return
    finally:
        if text := said.getvalue().strip():
            yield "note", f"{who} said: {' '.join(text.split())[:_MOST_SAID]}"
    for level, text in told:
        if level == "unmeasured":
            yield "note", f"{who} {text}. {NOT_MEASURED}", SET_INSTEAD
        elif level == "ok":
            yield level, f"{who} {text}"
        else:
            yield level, f"{who} {text}", _SEE_LOGS
