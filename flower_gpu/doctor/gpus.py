"""Checks of the driver, of each GPU, and of the GPUs that calls would use."""

from __future__ import annotations

import os
from collections.abc import Iterator

from flower_gpu.calls.grants import driver_cap
from flower_gpu.calls.settings import command_settings
from flower_gpu.doctor import FindingParts
from flower_gpu.errors import ConfigError, GPUUnavailableError, LeaseError
from flower_gpu.gpu import drivers, policy
from flower_gpu.gpu.gpus import GPU, Inventory
from flower_gpu.gpu.nvidia import mps_pipes
from flower_gpu.launch.gpu_check import why_never
from flower_gpu.printable import format_bytes

_CPU_IS_FINE = "nothing, if calls should run on the CPU; otherwise see `flower-gpu gpus`"


def driver(host_gpus: Inventory) -> Iterator[FindingParts]:
    """Check that NVML answers."""
    if host_gpus.gpus:
        usable = f"{len(host_gpus.usable)} of {len(host_gpus.gpus)} GPUs can be used"
        text = f"{drivers.of_host().name} driver {host_gpus.driver_version or 'of unknown version'}: {usable}"
        yield ("ok", text) if host_gpus.usable else ("problem", text, "see the lines about the GPUs")
    elif host_gpus.hangs or drivers.of_host().is_present():
        yield "problem", f"no GPU: {host_gpus.problem}", "make the driver work, see `flower-gpu gpus`"
    else:
        yield "note", f"no GPU: {host_gpus.problem}", _CPU_IS_FINE


def gpus(host_gpus: Inventory) -> Iterator[FindingParts]:
    """Check that each GPU is usable, and how calls can share it."""
    parents = {gpu.mig_parent for gpu in host_gpus.gpus}
    for gpu in host_gpus.gpus:
        name = f"GPU {gpu.index}{' MIG' if gpu.mig_parent else ''} ({gpu.name or 'model unknown'})"
        if gpu.is_usable:
            total, free = format_bytes(gpu.total_bytes or 0), format_bytes(gpu.free_bytes or 0)
            mode = f"; compute mode {gpu.compute_mode}" if gpu.compute_mode else ""
            limit = f"; the limit of control group {gpu.limited_by}" if gpu.limited_by else ""
            yield "ok", f"{name}: {free} of {total} free{limit}{mode}"
            if gpu.is_exclusive:
                text = f"{name}: clients cannot share it in this compute mode, so each call has it to itself"
                yield "note", text, f"as root `nvidia-smi -i {gpu.index} -c DEFAULT`, or start an MPS daemon"
        elif gpu.uuid and gpu.uuid in parents:
            yield "ok", f"{name}: {gpu.problem}"
        else:
            yield "problem", f"{name} cannot be used: {gpu.problem}", "see `flower-gpu gpus`"
    if host_gpus.usable:
        yield "ok", driver_cap.describe(tuple(gpu.uuid for gpu in host_gpus.usable[:1]), os.environ)
    if pipes := host_gpus.usable and mps_pipes(os.environ):
        yield "ok", f"calls are clients of the MPS daemon in {pipes}"


def calls(host_gpus: Inventory) -> Iterator[FindingParts]:
    """Check the GPUs of a call with this shell's variables: policy, request and ``CUDA_VISIBLE_DEVICES``."""
    try:
        settings = command_settings({}, os.environ).gpu
    except ConfigError:
        # The check of the variables reports this problem.
        return
    variable = drivers.of_host().visible_variable
    seen = host_gpus.visible(os.environ.get(variable))
    hidden = [gpu for gpu in host_gpus.usable if gpu not in seen]
    if hidden:
        text = f"{variable}={os.environ[variable]!r} hides {_names(hidden)}"
        yield (
            "note",
            text,
            "nothing, if that is intended; otherwise unset it, or name existing GPUs, each once",
        )
    try:
        decision = policy.decide(settings.policy, None, seen, host_gpus.problem, hidden=hidden)
    except GPUUnavailableError as error:
        yield "problem", f"calls fail: {error}", "make that GPU usable, or set FLOWER_GPU_POLICY=offer"
        return
    level = "problem" if decision.is_serious else "note"
    for warning in decision.warnings:
        yield level, warning, "change FLOWER_GPU_POLICY or FLOWER_GPU_IDS, if that is not intended"
    word = f"policy {settings.policy.gpu}"
    if not decision.on_gpu:
        yield "ok", f"{word}: calls run on the CPU"
        return
    candidates = [gpu for gpu in host_gpus.usable if gpu.uuid in decision.uuids]
    asked = settings.request.describe()
    try:
        why = why_never(settings.request, candidates, settings.reserve_bytes)
    except LeaseError:
        # The check of the ledger reports this problem.
        return
    if why is None:
        yield "ok", f"{word}: calls use {_names(candidates)}, {asked} unless the code says otherwise"
    else:
        todo = "set FLOWER_GPU_NUM_GPUS or FLOWER_GPU_MEMORY, or num_gpus or gpu_memory in the code, to that"
        yield "problem", f"calls ask for {asked}: {why}", todo


def _names(gpus: list[GPU]) -> str:
    names = [f"{gpu.index} {gpu.uuid}" if gpu.mig_parent else str(gpu.index) for gpu in gpus]
    return f"GPU {', '.join(names)}"
