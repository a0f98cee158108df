"""Log lines for callers, about leases, the devices of calls, and reasons for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flower_gpu.calls.settings import GPUSettings
from flower_gpu.errors import GPUUnavailableError
from flower_gpu.gpu import cuda_version, drivers, inventory
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.lease import Lease, LeaseRequest, Share
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.wording import describe
from flower_gpu.options import USE_GPU
from flower_gpu.printable import format_bytes
from flower_gpu.workers import events

_log = logging.getLogger(events.LOGGER)
_said: set[str] = set()  # lines that this process has logged once
_OUT_OF_MEMORY: Final = "figures of a call that ran out of memory"
_MAX_OTHERS: Final = 4  # number of other users of a GPU that a text lists


def say(text: str, level: int = logging.WARNING) -> None:
    """Log a line."""
    _log.log(level, text)


def say_once(text: str, level: int = logging.WARNING) -> None:
    """Log a line that would be the same for every call, only once in this process."""
    if text not in _said:
        _said.add(text)
        _log.log(level, text)


def say_out_of_memory(text: str, figures: str) -> None:
    """Log in a short text that a call ran out of GPU memory and is tried again.

    This may happen to many calls of a run, so only the first call logs its figures as a warning. Later calls
    log them as debug lines, and the trace has all of them.
    """
    say(text)
    is_first = _OUT_OF_MEMORY not in _said
    _said.add(_OUT_OF_MEMORY)
    if is_first:
        say(f"{figures}. For later calls, these figures are in the trace, and in the log with -v")
    else:
        say(figures, logging.DEBUG)


def say_why_no_cuda(lease: Lease, event: Mapping[str, Any]) -> None:
    """Log once why a worker could not use its GPU, from its ``no_cuda`` event, and what to do."""
    text = f"GPU {lease.shares[0].index} was leased, but {event.get('reason')}. Calls run on the CPU"
    if event.get("torch"):
        host = inventory.take(processes=False)
        versions = (event["torch"], event.get("torch_cuda"), host.driver_version, host.cuda_version)
        text = f"{text}. {cuda_version.explained(*versions)}"
    say_once(text)


def unmeasured(share: Share, task: str) -> str:
    """Return the notice about a GPU if its driver does not report the memory of processes."""
    return (
        "the NVIDIA driver does not report how much memory a process uses on GPU "
        f"{share.index} ({share.name}), as in some containers, on some MIG devices and with old drivers. "
        f"What {task} needs cannot be measured there without PyTorch, so each of its calls has a GPU to "
        "itself. Set the size yourself: num_gpus or gpu_memory (FLOWER_GPU_NUM_GPUS, FLOWER_GPU_MEMORY)"
    )


def who_else(lease: Lease, uuid: str) -> str:
    """Return a list of the other users of a GPU as text: holders of leases, and programs that NVML lists."""
    state = Ledger().status()
    lines = []
    pids = set()
    for entry in state.holders:
        pids |= {entry.pid, entry.reported()[0]}
        if entry.id != lease.id:
            parts = [part for part in entry.parts if part.uuid == uuid]
            lines += [f"{format_bytes(part.memory_bytes)} leased to {describe(entry)}" for part in parts]
    gpu = next((gpu for gpu in state.gpus if gpu.uuid == uuid), None)
    for process in (gpu.processes if gpu is not None else None) or ():
        if process.pid not in pids and process.used_bytes:
            lines.append(
                f"{format_bytes(process.used_bytes)} used by process {process.pid} {process.name}".rstrip()
            )
    more = [f"{len(lines) - _MAX_OTHERS} more"] if len(lines) > _MAX_OTHERS else []
    return "; ".join([*lines[:_MAX_OTHERS], *more]) or "no other known process"


def refused(label: str, lease: Lease) -> GPUUnavailableError:
    """Return the error of a call after CUDA refused its GPU as busy or unavailable."""
    share = lease.shares[0]
    gpu = inventory.take(processes=False).find(share.uuid)
    mode = gpu.compute_mode if gpu is not None else None
    todo = "see nvidia-smi -q -d COMPUTE,PIDS, and the log of the MPS daemon, if one runs"
    if mode != "DEFAULT":
        todo = (
            "only one process at a time may compute there, and a program that the driver does not list does. "
            f"End it, or as root nvidia-smi -i {share.index} -c DEFAULT"
        )
    return GPUUnavailableError(
        f"{label}: CUDA refused GPU {share.index} ({share.name}) as busy or unavailable. Its compute "
        f"mode is {mode or 'unknown'}: {todo}. Also there: {who_else(lease, share.uuid)}"
    )


_NO_GPU: Final = "no GPU can be used here (see flower-gpu gpus)"


def calls_run(
    settings: GPUSettings,
    gpus: Sequence[GPU],
    concurrency: int | None,
    use_gpu: bool | None,
    env: Mapping[str, str],
) -> str:
    """Return the line that says on which devices calls with these settings run.

    ``settings``: settings of the calls.
    ``gpus``: GPUs that the calls may use. Empty: they run on the CPU.
    ``concurrency``: maximum number of calls at a time. None: as many as have room.
    ``use_gpu``: the server's request for a GPU, or None.
    ``env``: environment of the calls.
    """
    number = "as many at a time as fit" if concurrency is None else f"up to {concurrency} at a time"
    if gpus:
        names = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)
        return f"calls run on {names}: {number}"
    why = why_on_cpu(settings, use_gpu, env)
    return f"{'no GPU here' if why == _NO_GPU else why}: calls run on the CPU, {number}"


def why_on_cpu(settings: GPUSettings, use_gpu: bool | None, env: Mapping[str, str]) -> str:
    """Return the reason why calls run on the CPU."""
    word = settings.policy.gpu
    if word == "never":
        return "the device policy is never"
    if word == "offer" and use_gpu is False:
        return f"{USE_GPU.run_config_key} is false"
    variable = drivers.of_host().visible_variable
    if env.get(variable) is not None:
        return f"{_NO_GPU}; {variable} is {env[variable]!r}"
    return _NO_GPU


def without_effect(request: LeaseRequest, calls: str, why: str) -> str:
    """Return the note that a request for a GPU has no effect, because the calls run on the CPU."""
    ranks = request.count
    but = f" except for distributed functions, which run in {ranks} ranks" if ranks > 1 else ""
    return f"note: {request.written} has no effect{but}: {calls} run on the CPU, {why}"
