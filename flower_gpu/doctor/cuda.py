"""PyTorch's build against the driver, and whether CUDA works: tried in a process under a lease."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flower_gpu.calls import environment
from flower_gpu.calls.settings import reserve_bytes
from flower_gpu.doctor import Found
from flower_gpu.doctor.gpus import NOT_MEASURED, SET_INSTEAD
from flower_gpu.errors import ConfigError, GPUError, LeaseTimeoutError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.cuda_version import how_to_install, is_too_new, what_to_change
from flower_gpu.gpu.inventory import GPU, Inventory
from flower_gpu.leases.admission import Option
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.leases.ledger import Ledger, Wish
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Ticket

_LIBRARY = "libcuda.so.1"
_POLICY = "FLOWER_GPU_POLICY"
_TRIAL_BYTES = 256 << 20  # beyond the context
_LEASE_WAIT_S = 3.0
_TRIAL_S = 60.0

_TRIAL = """
import json, os, torch
from flower_gpu.gpu import inventory
try:
    numbers = torch.ones(256, 256, device="cuda")
    total = (numbers @ numbers).sum().item()
    told = {"device": torch.cuda.get_device_name(0)} if total == 256**3 else {"error": f"1 + 1 is {total}"}
    gpu = inventory.take().find(os.environ["CUDA_VISIBLE_DEVICES"])
    here = [one for one in gpu.processes or () if one.pid == os.getpid()] if gpu else ()
    told["is_measured"] = any(one.used_bytes for one in here)
except Exception as error:
    told = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(told))
"""


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


def works(found: Inventory) -> Iterator[Found]:
    """Check that CUDA works, by a small sum on a GPU in a process that holds a lease there."""
    seen = inventory.visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    candidates = [gpu for gpu in seen if gpu.is_usable]
    ours = build()
    if not candidates or ours is None or ours.cuda is None or driver_cuda()[0] is None:
        return  # the check of torch tells
    if os.environ.get(_POLICY) == "never":
        return
    try:
        yield from _works_on_one_of(candidates)
    except ConfigError as error:
        yield "problem", str(error), "correct that variable"


def _works_on_one_of(candidates: list[GPU]) -> Iterator[Found]:
    folder = LedgerFolder.find()
    ledger = Ledger(LedgerFolder(folder.root, mutex_wait_s=_LEASE_WAIT_S), reserve_bytes(os.environ))
    footprints = Footprints()
    sizes = {gpu.uuid: footprints.context(gpu.name) + _TRIAL_BYTES for gpu in candidates}
    options = tuple(Option(uuid, size) for uuid, size in sizes.items())
    wish = Wish(lambda gpus: options, label="flower-gpu doctor")
    try:
        ticket = ledger.acquire(wish, deadline=time.monotonic() + _LEASE_WAIT_S)
    except LeaseTimeoutError:
        yield "note", "not tried: all GPUs are in use", "nothing; try again later (`flower-gpu leases`)"
        return
    except GPUError as error:
        yield "note", f"not tried: {error}"
        return
    try:
        yield from _tried(ticket, {gpu.uuid: gpu for gpu in candidates}, footprints)
    finally:
        ledger.release(ticket)


def _tried(ticket: Ticket, gpus: dict[str, GPU], footprints: Footprints) -> Iterator[Found]:
    part = ticket.entry.parts[0]
    gpu = gpus[part.uuid]
    total = gpu.total_bytes or part.memory_bytes
    cap_bytes = part.memory_bytes - footprints.context(gpu.name)
    share = Share(gpu.uuid, gpu.index, gpu.name, total, part.memory_bytes, cap_bytes, gpu.device_files)
    lease = Lease(ticket.entry.id, (share,), ticket=str(ticket.entry.path))
    env = {**os.environ, **environment.of_worker(lease, os.environ)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], env=env, capture_output=True, text=True, timeout=_TRIAL_S
        )
    except subprocess.TimeoutExpired:
        text = f"CUDA on GPU {gpu.index} does not answer within {_TRIAL_S:g} s"
        yield "problem", text, "see the kernel's log (dmesg) for lines with NVRM or Xid"
        return
    try:  # the last line, after what libraries may print
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        told = {"error": (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]}
    if "error" in told:
        error = str(told["error"]).strip().partition("\n")[0]
        yield "problem", f"CUDA does not work on GPU {gpu.index}: {error}", "see `nvidia-smi`, and dmesg"
        return
    yield "ok", f"a worker computed on GPU {gpu.index} ({told['device']})"
    if not told.get("is_measured"):
        text = f"the driver does not tell how much memory that worker used. {NOT_MEASURED}"
        yield "note", text, SET_INSTEAD
