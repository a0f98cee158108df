"""Driver, GPUs, what calls would get, PyTorch's build, and whether CUDA works: tried under a lease."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from flower_gpu.calls.settings import GPUSettings
from flower_gpu.doctor import Found
from flower_gpu.errors import ConfigError, GPUUnavailableError, LeaseError
from flower_gpu.gpu import guard, inventory, policy, sharing
from flower_gpu.gpu.inventory import GPU, Inventory
from flower_gpu.launch.gpu_check import why_never
from flower_gpu.leases.footprint_rule import LEAST_CONTEXT_BYTES
from flower_gpu.printable import format_bytes
from flower_gpu.workers import confinement

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NONE = ("", "-1", "NoDevFiles")  # how people and batch systems write that there is to be none
#: What follows where the driver does not tell how much memory a process uses, and what to do.
NOT_MEASURED = (
    "The size of CUDA contexts, and what calls without PyTorch need, cannot be measured where that is so for "
    "processes of this account"
)
SET_INSTEAD = (
    "for JAX, TensorFlow and CuPy set FLOWER_GPU_NUM_GPUS or FLOWER_GPU_MEMORY, or num_gpus or gpu_memory in "
    "the code: without it each call has a GPU to itself"
)
_CPU_IS_FINE = "nothing, if calls are to run on the CPU; else see `flower-gpu gpus`"


def driver(found: Inventory) -> Iterator[Found]:
    """Check that NVML answers."""
    if found.gpus:
        usable = f"{len(found.usable)} of {len(found.gpus)} GPUs can be used"
        text = f"NVIDIA driver {found.driver_version or 'of unknown version'}: {usable}"
        yield ("ok", text) if found.usable else ("problem", text, "see the lines about the GPUs")
    elif found.hangs or _half_there():
        yield "problem", f"no GPU: {found.problem}", "make the driver work, see `flower-gpu gpus`"
    else:
        yield "note", f"no GPU: {found.problem}", _CPU_IS_FINE


def gpus(found: Inventory) -> Iterator[Found]:
    """Check each GPU."""
    parents = {gpu.mig_parent for gpu in found.gpus}
    for gpu in found.gpus:
        name = f"GPU {gpu.index}{' MIG' if gpu.mig_parent else ''} ({gpu.name or 'model unknown'})"
        if gpu.is_usable:
            total, free = format_bytes(gpu.total_bytes or 0), format_bytes(gpu.free_bytes or 0)
            mode = f"; compute mode {gpu.compute_mode}" if gpu.compute_mode else ""
            yield "ok", f"{name}: {free} of {total} free{mode}"
            yield from _untold(gpu, name)
            if sharing.is_for_one(gpu, os.environ):
                text = f"{name}: clients cannot share it in this compute mode, each call has it to itself"
                yield "note", text, f"as root `nvidia-smi -i {gpu.index} -c DEFAULT`, or start an MPS daemon"
        elif gpu.uuid and gpu.uuid in parents:
            yield "ok", f"{name}: {gpu.problem}"
        else:
            yield "problem", f"{name} cannot be used: {gpu.problem}", "see `flower-gpu gpus`"
    if found.usable:
        pipes = sharing.mps_pipes(os.environ)
        yield "ok", f"calls are clients of the MPS daemon in {pipes}" if pipes else "no MPS daemon was found"
    asleep = [gpu for gpu in found.gpus if gpu.persistence_mode is False]
    if asleep:
        text = f"persistence mode of {_names(asleep)} is off: with nobody on it, a GPU takes seconds to start"
        yield "note", text, "as root `nvidia-smi -pm 1`, or the service nvidia-persistenced"


def gpu_guard() -> Iterator[Found]:
    """Check whether workers can be kept from GPUs that are not theirs."""
    todo = "nothing, if you know the apps that you run; else see docs/explanation/security.md"
    if reason := guard.problem():
        yield "note", f"apps can use any GPU of this host: {reason}", todo
        return
    yield "ok", guard.describe() or "workers can be kept from GPUs that are not of their lease"
    if outside := guard.outside_of_workers():
        yield "note", outside, todo


def app_confinement(asked: str | None = None) -> Iterator[Found]:
    """Check whether ``flower-gpu supernode --confine`` can confine apps on this host.

    ``asked``: how they are to be confined; None where nobody asks for that.
    """
    if reason := confinement.problem():
        todo = "nothing, if you know the apps that you run; else see docs/how-to/confine.md"
        level = "problem" if asked else "note"
        yield level, f"apps cannot be confined (flower-gpu supernode --confine): {reason}", todo
    elif missing := confinement.not_refused():
        text = f"--confine does not refuse {'; '.join(missing)}"
        level = "problem" if asked == "strict" else "note"
        yield level, text, "nothing, or a newer kernel, which --confine=strict requires"
    else:
        yield "ok", "flower-gpu supernode --confine=strict can confine apps"


def _untold(gpu: GPU, name: str) -> Iterator[Found]:
    """Tell what cannot be measured because the driver does not say who uses how much."""
    unlisted = inventory.unlisted_bytes(gpu) or 0
    if gpu.processes is None:
        text = f"{name}: the driver does not tell who uses it"
    elif any(process.used_bytes is None for process in gpu.processes):
        text = f"{name}: the driver does not tell how much each process uses"
    elif gpu.reserved_bytes is not None and unlisted >= LEAST_CONTEXT_BYTES:
        used = format_bytes(unlisted)
        text = f"{name}: {used} are used by nobody whom the driver lists here, as in containers"
    else:
        return
    yield "note", f"{text}. {NOT_MEASURED}", SET_INSTEAD


def visible(found: Inventory) -> Iterator[Found]:
    """Check what ``CUDA_VISIBLE_DEVICES`` leaves."""
    text = os.environ.get(_VARIABLE)
    if text is None or not found.gpus:
        return
    seen = inventory.visible(found, text)
    hidden = [gpu for gpu in found.usable if gpu not in seen]
    shown = f"{_VARIABLE}={text!r}"
    cards = [gpu for gpu in seen if gpu.mig_parent is None] or list(seen)
    if (
        text.strip() not in _NONE
        and len(cards) < len(text.split(","))
        and not any(gpu.mig_parent for gpu in seen)
    ):
        yield (
            "problem",
            f"{shown} names a GPU that is not there, or one twice: CUDA shows {_names(seen) or 'none'}",
            "name GPUs of `flower-gpu gpus`, each once, or unset it",
        )
    elif hidden:
        yield "note", f"{shown} hides {_names(hidden)}", "nothing, if that is meant; else unset it"
    else:
        yield "ok", f"{shown} hides no GPU"


def calls(found: Inventory) -> Iterator[Found]:
    """Check what a call would get under the policy and the request of the environment."""
    try:
        settings = GPUSettings.resolve(environ=os.environ)
    except ConfigError:
        return  # the check of the variables tells
    seen = inventory.visible(found, os.environ.get(_VARIABLE))
    hidden = [gpu for gpu in found.usable if gpu not in seen]
    word = settings.policy.gpu
    try:
        decision = policy.decide(settings.policy, None, seen, found.problem, hidden=hidden)
    except GPUUnavailableError as error:
        yield "problem", f"calls fail: {error}", "make that GPU usable, or set FLOWER_GPU_POLICY=offer"
        return
    level = "problem" if decision.is_serious else "note"
    for warning in decision.warnings:
        yield level, warning, "change FLOWER_GPU_POLICY or FLOWER_GPU_IDS, if that is not meant"
    if not decision.on_gpu:
        yield "ok", f"policy {word}: calls run on the CPU"
        return
    candidates = [gpu for gpu in found.usable if gpu.uuid in decision.uuids]
    asked = settings.request.describe()
    try:
        why = why_never(settings.request, candidates, settings.reserve_bytes)
    except LeaseError:
        return  # the check of the ledger tells
    if why is None:
        yield (
            "ok",
            f"policy {word}: calls use {_names(candidates)}, {asked} where the code names nothing else",
        )
    else:
        todo = "set FLOWER_GPU_NUM_GPUS or FLOWER_GPU_MEMORY, or num_gpus or gpu_memory in the code, to that"
        yield "problem", f"calls ask for {asked}: {why}", todo


def _names(gpus: list[GPU] | tuple[GPU, ...]) -> str:
    names = [f"{gpu.index}{' ' + gpu.uuid if gpu.mig_parent else ''}" for gpu in gpus]
    return f"GPU {', '.join(names)}" if names else ""


def _half_there() -> bool:
    """Tell whether something of the driver is here."""
    return Path("/proc/driver/nvidia/version").exists() or any(Path("/dev").glob("nvidia[0-9]*"))
