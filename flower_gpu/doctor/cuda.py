"""PyTorch's build against the driver, and whether CUDA works: tried in a process under a lease."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flower_gpu.doctor.findings import Found
from flower_gpu.doctor.gpus import NOT_MEASURED, SET_INSTEAD
from flower_gpu.errors import ConfigError, GPUError, LeaseTimeoutError
from flower_gpu.gpu import cap, inventory
from flower_gpu.gpu.admission import Option
from flower_gpu.gpu.cuda_version import how_to_install, is_too_new, what_to_change
from flower_gpu.gpu.footprint import Footprints
from flower_gpu.gpu.inventory import GPU, Inventory
from flower_gpu.gpu.lease import Lease, Share
from flower_gpu.gpu.ledger import Ledger, Wish
from flower_gpu.gpu.ledger_folder import LedgerFolder
from flower_gpu.gpu.settings import reserve_bytes
from flower_gpu.gpu.tickets import Ticket

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
print("told " + json.dumps(told))
"""


@dataclass(frozen=True)
class Build:
    """The PyTorch that is installed.

    Parameters
    ----------
    version : str
        Its version.
    cuda : str or None
        The CUDA it was built for.
    """

    version: str
    cuda: str | None


def build() -> Build | None:
    """Read what PyTorch was built for, without importing it; None where it is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    text = (Path(found.submodule_search_locations[0]) / "version.py").read_text()
    values = dict(re.findall(r"^(\w+)(?:\s*:[^=\n]+)? = '([^']+)'", text, re.MULTILINE))
    return Build(values.get("__version__", "of unknown version"), values.get("cuda"))


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
        yield (
            "problem",
            f"{text}, on a host with a GPU: calls run on the CPU",
            how_to_install(found.cuda_version),
        )
        return
    supported, reason = driver_cuda()
    if supported is None:
        yield (
            "problem",
            f"{text}, but CUDA's part of driver {found.driver_version} cannot be used: {reason}",
            "install all of the driver; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    elif is_too_new(ours.cuda, supported):
        yield (
            "problem",
            f"{text}, but driver {found.driver_version} has CUDA {supported[0]}.{supported[1]} at most",
            what_to_change(ours.cuda, supported),
        )
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
    share = Share(gpu.uuid, gpu.index, gpu.name, total, part.memory_bytes, cap_bytes)
    lease = Lease(ticket.entry.id, (share,), ticket=str(ticket.entry.path))
    env = {**os.environ, **cap.worker_environment(lease, os.environ)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], env=env, capture_output=True, text=True, timeout=_TRIAL_S
        )
    except subprocess.TimeoutExpired:
        text = f"CUDA on GPU {gpu.index} does not answer within {_TRIAL_S:g} s"
        yield "problem", text, "see the kernel's log (dmesg) for lines with NVRM or Xid"
        return
    told = {"error": _last_line(done.stderr) or f"exit status {done.returncode}"}
    for line in done.stdout.splitlines():
        if line.startswith("told "):
            with suppress(ValueError):
                told = json.loads(line.removeprefix("told "))
    if "error" in told:
        error = str(told["error"]).strip().partition("\n")[0]
        yield "problem", f"CUDA does not work on GPU {gpu.index}: {error}", "see `nvidia-smi`, and dmesg"
        return
    yield "ok", f"a worker computed on GPU {gpu.index} ({told['device']})"
    if not told.get("is_measured"):
        text = f"the driver does not tell how much memory that worker used. {NOT_MEASURED}"
        yield "note", text, SET_INSTEAD


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
