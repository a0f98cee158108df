"""Log lines for callers: about leases, the place of calls, and reasons for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flower_gpu.calls.settings import GPUSettings
from flower_gpu.errors import GPUUnavailableError, text_of
from flower_gpu.gpu import cuda_version, inventory
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.lease import Lease, LeaseRequest, Share
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.wording import describe
from flower_gpu.options import GPU_GUARD, USE_GPU
from flower_gpu.printable import format_bytes
from flower_gpu.workers import events

_log = logging.getLogger(events.LOGGER)
_said: set[str] = set()  # in this process
_OUT_OF_MEMORY: Final = "figures of a call that ran out of memory"
_MOST_ELSE: Final = 4  # others on a GPU that are named


def say(text: str, level: int = logging.WARNING) -> None:
    """Log a line."""
    _log.log(level, text)


def say_once(text: str, level: int = logging.WARNING) -> None:
    """Log a line that would be the same for every call; in this process it is logged once."""
    if text not in _said:
        _said.add(text)
        _log.log(level, text)


def say_out_of_memory(text: str, figures: str) -> None:
    """Log that a call ran out of GPU memory and is tried again, in a short text.

    Many calls of a run may, so the figures are a warning for the first one only. Those of later calls are
    debug lines, and the trace has all.
    """
    say(text)
    is_first = _OUT_OF_MEMORY not in _said
    _said.add(_OUT_OF_MEMORY)
    if is_first:
        say(f"{figures}. Of later calls the trace has these figures, and the log with -v")
    else:
        say(figures, logging.DEBUG)


def say_no_guard(reason: str, *, is_expected: bool) -> None:
    """Log once that the kernel does not keep calls from GPUs of other leases.

    ``is_expected``: this host has no guard at all, or the user runs calls where there is none. Then the line
    is no warning.
    """
    text = f"no GPU guard: calls can use any GPU of this host ({reason})"
    if is_expected:
        say_once(text, logging.INFO)
    else:
        say_once(f"{text}. --gpu-guard require ({GPU_GUARD.variable}) refuses such calls")


def say_why_no_cuda(lease: Lease, told: Mapping[str, Any]) -> None:
    """Log once why a worker could not use its GPU, by its ``no_cuda`` event, with a way out."""
    text = f"GPU {lease.shares[0].index} was leased, but {told.get('reason')}. Calls run on the CPU"
    if told.get("torch"):
        host = inventory.take(processes=False)
        versions = (told["torch"], told.get("torch_cuda"), host.driver_version, host.cuda_version)
        text = f"{text}. {cuda_version.explained(*versions)}"
    say_once(text)


def untold(share: Share, task: str) -> str:
    """Return the line about a GPU whose driver does not tell the memory of a process."""
    return (
        "the NVIDIA driver does not tell how much memory a process uses on GPU "
        f"{share.index} ({share.name}), as in some containers, on some MIG devices and with old drivers. "
        f"What {task} needs cannot be measured there without PyTorch, so each of its calls has a GPU to "
        "itself. Say how much is enough: num_gpus or gpu_memory (FLOWER_GPU_NUM_GPUS, FLOWER_GPU_MEMORY)"
    )


def who_else(lease: Lease, uuid: str) -> str:
    """Return who else is on a GPU at this moment: holders of leases, and programs that NVML names."""
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
    more = [f"{len(lines) - _MOST_ELSE} more"] if len(lines) > _MOST_ELSE else []
    return "; ".join([*lines[:_MOST_ELSE], *more]) or "nobody else that is known"


def refused(label: str, lease: Lease) -> GPUUnavailableError:
    """Return the error of a call whose GPU CUDA has refused to it, as busy or unavailable."""
    share = lease.shares[0]
    gpu = inventory.take(processes=False).find(share.uuid)
    mode = gpu.compute_mode if gpu is not None else None
    todo = "see nvidia-smi -q -d COMPUTE,PIDS, and the log of an MPS daemon where there is one"
    if mode != "DEFAULT":
        todo = (
            "there one process at a time computes, and another program does that the driver does not list. "
            f"End it, or as root nvidia-smi -i {share.index} -c DEFAULT"
        )
    return GPUUnavailableError(
        f"{label}: CUDA refused GPU {share.index} ({share.name}) as busy or unavailable. Its compute "
        f"mode is {mode or 'unknown'}: {todo}. Also there: {who_else(lease, share.uuid)}"
    )


def faulted(label: str, lease: Lease, error: BaseException) -> GPUUnavailableError:
    """Return the error of a call that has ended with the MPS server of its GPU."""
    return GPUUnavailableError(
        f"{label}: a fault on GPU {lease.shares[0].index} has ended all calls that this run had there, as "
        "they share it by one MPS server (--mps). It may be another one's: without --mps only the call with "
        f"the fault fails. {text_of(error)}"
    )


_NO_GPU: Final = "no GPU can be used here (see flower-gpu gpus)"


def calls_run(
    settings: GPUSettings,
    gpus: Sequence[GPU],
    at_once: int | None,
    use_gpu: bool | None,
    env: Mapping[str, str],
) -> str:
    """Return the line that says where calls with these settings run.

    ``settings``: of the calls.
    ``gpus``: those that they may use; none: they run on the CPU.
    ``at_once``: how many run at a time, at most. None: as many as have room.
    ``use_gpu``: what the server wants.
    ``env``: the environment of the calls.
    """
    number = "as many at a time as have room" if at_once is None else f"up to {at_once} at a time"
    if gpus:
        names = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)
        return f"calls run on {names}: {number}"
    why = why_on_cpu(settings, use_gpu, env)
    return f"{'no GPU here' if why == _NO_GPU else why}: calls run on the CPU, {number}"


def why_on_cpu(settings: GPUSettings, use_gpu: bool | None, env: Mapping[str, str]) -> str:
    """Return why calls run on the CPU."""
    word = settings.policy.gpu
    if word == "never":
        return "the device policy is never"
    if word == "offer" and use_gpu is False:
        return f"{USE_GPU.run_config_key} is false"
    if env.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"{_NO_GPU}; CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}"
    return _NO_GPU


def without_effect(request: LeaseRequest, who: str, why: str) -> str:
    """Return that a request for a GPU has no effect, since the calls run on the CPU."""
    ranks = request.count
    but = f" but for distributed functions, which run in {ranks} ranks" if ranks > 1 else ""
    return f"note: {request.written} has no effect{but}: {who} run on the CPU, {why}"
